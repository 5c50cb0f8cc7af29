"""`memprof predict` as it is typed and read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.cli.main import main
from memprof.policies.plan.plan_file import read_plan
from memprof.replay.live import live_bytes
from memprof.trace.store import Trace

SAMPLE = Path(__file__).parent.parent.parent / "sample_traces" / "gpt" / "run.memprof"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(SAMPLE, "run.memprof")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    assert main(list(map(str, words))) == status
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out if status == 0 else captured.err


def test_page_says_what_changes_and_how_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """Peak and step time before and after, each policy, phase and category, how each is known, what to type next."""
    page = run(capsys, "predict", "run.memprof", "--checkpoint", "layers.*", "--precision", "bf16", "--no-run")
    lines = page.splitlines()
    assert lines[0].startswith("predicted peak ")
    assert lines[1].startswith("peak recorded:  step 4, forward")
    assert lines[2].startswith("peak predicted: step 4, ")
    assert lines[3].startswith("expect ")
    assert lines[4].startswith("step time ")
    for title in ("Policies", "Peak of each phase", "Live bytes at the peak, by category"):
        assert any(line.startswith(title) for line in lines)
    rows = {line.split()[0] for line in lines if line}
    assert {"precision", "checkpoint", "forward", "backward", "optimizer", "activation", "parameter", "total"} <= rows
    assert "checkpoint: replayed: every operator and storage of the recording replayed" in page
    assert "precision: estimated by a rule of thumb" in page
    assert "precision: numerics differ by rounding" in page
    assert lines[-1].startswith("next: ")


def test_json_has_stable_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes and microseconds as numbers; what is predicted is what the replay of the rewritten step gives."""
    told = json.loads(run(capsys, "predict", "run.memprof", "--checkpoint", "layers.*", "--json"))
    keys = "schema trace step batch how recorded predicted change budget_bytes fits policies warnings"
    assert set(told) == {*keys.split(), "peak_interval_bytes", "step_time_interval_us", "length", "lengths"}
    before, after = told["recorded"], told["predicted"]
    assert {"peak_allocated_bytes", "peak_phase", "step_time_us", "phases", "categories"} <= set(after)
    assert sum(after["categories"].values()) == after["peak_allocated_bytes"]
    assert sum(before["categories"].values()) == before["peak_allocated_bytes"]
    assert told["change"]["peak_bytes"] == after["peak_allocated_bytes"] - before["peak_allocated_bytes"] < 0
    (policy,) = told["policies"]
    assert policy["policy"] == "checkpoint"
    assert policy["settings"] == {"modules": ["layers.*"]}
    assert (policy["how"], policy["numerics"]) == ("replayed", "none")
    assert policy["peak_allocated_bytes"] == after["peak_allocated_bytes"]


def test_predicted_step_is_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """`-o` writes a trace that reports like any other, with the predicted peak, and says what it is."""
    told = json.loads(run(capsys, "predict", "run.memprof", "--checkpoint", "layers.*", "-o", "p.memprof", "--json"))
    trace = Trace.open("p.memprof")
    step = trace.steady_step()
    step.check()
    assert int(live_bytes(step).during.max()) == told["predicted"]["peak_allocated_bytes"]
    # Times are rounded in the file.
    assert step.duration_us == pytest.approx(told["predicted"]["step_time_us"], rel=1e-6)
    assert trace.manifest.backend.name == "predicted"
    assert (trace.manifest.plan or {})["checkpoint"] == {"modules": ["layers.*"]}
    shown = run(capsys, "report", "p.memprof")
    assert "predicted under checkpoint layers.*" in shown
    assert "step 4 predicted" in shown
    reported = json.loads(run(capsys, "report", "p.memprof", "--json"))
    assert reported["peak"]["allocated_bytes"] == told["predicted"]["peak_allocated_bytes"]
    assert reported["plan"] == {"checkpoint": {"modules": ["layers.*"]}}


def test_written_plan_carries_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    """`--write` leaves a plan whose prediction is what was printed; predicting from it gives the same again."""
    told = json.loads(
        run(capsys, "predict", "run.memprof", "--checkpoint", "layers.*", "--write", "plan.toml", "--json")
    )
    plan = read_plan("plan.toml")
    assert plan.prediction is not None
    assert plan.prediction.peak_allocated_bytes == told["predicted"]["peak_allocated_bytes"]
    assert plan.prediction.phases == told["predicted"]["phases"]
    assert plan.prediction.trace == "run.memprof"
    again = json.loads(run(capsys, "predict", "run.memprof", "--plan", "plan.toml", "--json"))
    assert again["predicted"] == told["predicted"]


def test_plan_written_back_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Writing into the plan that was read needs no -f, and preserves manual edits."""
    mine = "# ours\n[checkpoint]\nmodules = 'layers.*'  # all of them\n"
    Path("plan.toml").write_text(mine)
    run(capsys, "predict", "run.memprof", "--plan", "plan.toml", "--write", "plan.toml")
    assert Path("plan.toml").read_text().startswith(mine)
    assert read_plan("plan.toml").prediction is not None


def test_plan_that_changes_nothing_predicts_the_recording(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty plan gives the recorded peak, phase by phase."""
    Path("plan.toml").write_text("")
    told = json.loads(run(capsys, "predict", "run.memprof", "--plan", "plan.toml", "--json"))
    assert told["recorded"] == told["predicted"]
    assert "no change" in run(capsys, "predict", "run.memprof", "--plan", "plan.toml")


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (("run.memprof",), 2, "nothing to predict: give --plan FILE"),
        (("run.memprof", "--checkpoint", "layerz.*"), 2, "no module of the model matches 'layerz.*'; did you mean"),
        (("run.memprof", "--precision", "int3"), 2, "unknown --precision 'int3'"),
        (("run.memprof", "--plan", "absent.toml"), 5, "plan absent.toml does not exist"),
        (("absent.memprof", "--checkpoint", "layers.*"), 5, "no file absent.memprof"),
        (("run.memprof", "--checkpoint", "layers.*", "--step", "99"), 2, "no operators of step 99"),
        (("run.memprof", "--checkpoint", "layers.*", "-o", "run.memprof"), 2, "run.memprof exists already"),
        (("run.memprof", "--checkpoint", "layers.*", "--write", "other.toml"), 2, "other.toml exists already"),
        (("run.memprof", "--checkpoint", "layers.*", "--write", "no/plan.toml"), 5, "no/plan.toml cannot be written"),
    ],
)
def test_mistakes_are_one_sentence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], status: int, sentence: str
) -> None:
    """Errors are reported in one message with their exit code; existing files are unchanged."""
    Path("other.toml").write_text("mine")
    said = run(capsys, "predict", *words, status=status)
    assert sentence in said
    assert len(said.strip().splitlines()) == 1
    assert Path("other.toml").read_text() == "mine"
    assert Path("run.memprof").read_bytes() == SAMPLE.read_bytes()


def test_page_fits_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal of 80 columns no line is longer; a pipe receives no escape sequences."""
    assert "\x1b" not in run(capsys, "predict", "run.memprof", "--checkpoint", "layers.*")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    page = run(capsys, "predict", "run.memprof", "--checkpoint", "layers.*", "--precision", "bf16")
    assert max(len(line) for line in page.splitlines()) <= 80


def test_prediction_needs_no_torch() -> None:
    """Predicting runs where torch is not installed; `memprof --help` imports neither numpy nor any policy."""
    code = (
        "import sys; from memprof.cli.main import main; "
        "status = main(['predict', 'run.memprof', '--checkpoint', 'layers.*', '--json']); "
        "print(status, 'torch' in sys.modules, file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == "0 False\n"
    code = (
        "import sys; from memprof.cli.main import main; main(['--help']); "
        "print([name for name in sys.modules if name in ('numpy', 'torch', 'tomlkit') or 'policies' in name])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


def test_what_spoils_the_prediction_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A recording made under a plan causes a warning."""
    run(capsys, "predict", "run.memprof", "--checkpoint", "layers.*", "-o", "p.memprof")
    Path("plan.toml").write_text("")
    told = json.loads(run(capsys, "predict", "p.memprof", "--plan", "plan.toml", "--json"))
    expected = "p.memprof was predicted under a plan already: this prediction is relative to that run."
    assert told["warnings"] == [expected]
    assert f"warning: {expected}" in run(capsys, "predict", "p.memprof", "--plan", "plan.toml")
