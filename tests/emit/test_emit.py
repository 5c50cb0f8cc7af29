"""`memprof emit` and `memprof suggest --emit` as they are typed and read."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from memprof.cli.main import main
from memprof.emit.emission import Request
from memprof.emit.registry import TARGETS, target_named
from memprof.emit.switches import in_own_names
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import parse_plan
from memprof.policies.plan.prediction import Prediction

SAMPLES = Path(__file__).parents[2] / "sample_traces"
PLAN = "[checkpoint]\nmodules = ['layers.*']\n[precision]\ndtype = 'bf16'\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text(PLAN)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> tuple[str, str]:
    assert main(list(map(str, words))) == status
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out, captured.err


@pytest.mark.parametrize("target", [name for name in TARGETS if name in ("pytorch", "hf", "lightning", "torchtitan")])
def test_code_stands_on_stdout_and_remarks_on_stderr(capsys: pytest.CaptureFixture[str], target: str) -> None:
    """The text can be sent to a file as it is: it is Python, and begins with what the plan is."""
    out, _ = run(capsys, "emit", "plan.toml", "--to", target)
    compile(out, "under_plan.py", "exec")
    assert out.startswith('"""Trains under a memprof plan.\n\nPlan: precision bf16, checkpoint layers.*.\n')
    assert "from plan.toml" in out


def test_a_file_is_imported_by_its_name_and_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    """-o writes the file and reports it; without -f an existing file is unchanged."""
    _, err = run(capsys, "emit", "plan.toml", "--to", "pytorch", "-o", "gpt_plan.py")
    assert err == "memprof: wrote gpt_plan.py\n"
    assert "    from gpt_plan import prepare\n" in Path("gpt_plan.py").read_text()
    Path("gpt_plan.py").write_text("mine")
    _, err = run(capsys, "emit", "plan.toml", "--to", "pytorch", "-o", "gpt_plan.py", status=2)
    assert err == "memprof: gpt_plan.py exists already. Replace it with -f, or choose another name.\n"
    assert Path("gpt_plan.py").read_text() == "mine"
    run(capsys, "emit", "plan.toml", "--to", "pytorch", "-o", "gpt_plan.py", "-f")
    assert "prepare" in Path("gpt_plan.py").read_text()
    _, err = run(capsys, "emit", "plan.toml", "--to", "pytorch", "-o", "nowhere/plan.py", status=2)
    assert "no folder nowhere" in err


def test_what_is_missing_is_said_and_the_rest_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 0, JSON on stdout, and on stderr a note for whatever JSON cannot express."""
    out, err = run(capsys, "emit", "plan.toml", "--to", "deepspeed", "--batch", 8)
    assert '"dtype": "bfloat16"' in out
    assert "memprof: cannot express checkpoint layers.*: the JSON cannot select modules" in err


@pytest.mark.parametrize(
    ("plan", "target", "status", "part"),
    [
        (PLAN, "fsdp2", 2, "PyTorch FSDP2 can express nothing of plan.toml: the plan shards nothing"),
        ("[compress]", "deepspeed", 2, "DeepSpeed can express nothing of plan.toml: compress everything saved"),
        ("# none", "pytorch", 2, "nothing to write: plan.toml has no policies."),
        ("[checkpoint]\nmodule = 1", "pytorch", 2, "module"),
        ("no toml", "pytorch", 5, "plan.toml is not valid TOML"),
    ],
)
def test_where_nothing_can_be_written_one_sentence_says_why(
    capsys: pytest.CaptureFixture[str], plan: str, target: str, status: int, part: str
) -> None:
    """And nothing is on stdout."""
    Path("plan.toml").write_text(plan)
    out, err = run(capsys, "emit", "plan.toml", "--to", target, status=status)
    assert out == ""
    assert err.startswith("memprof: ")
    assert err.count("\n") == 1
    assert part in err


def test_no_target_needs_torch_to_write(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without torch every form is written, of every policy there is."""
    monkeypatch.setitem(sys.modules, "torch", None)
    text = (
        "[shard]\nworld_size = 2\n[precision]\ndtype = 'bf16'\n[accumulate]\nmicro_batches = 2\n[loss]\n"
        "[checkpoint]\nmodules = ['layers.*']\n[swap]\n[compress]\nmodules = ['head']\n[optimizer]\nloop = 'fused'\n"
        "[compile]\nmodules = ['head']\n[remat]\nbudget = '1GiB'\n[allocator]\nexpandable_segments = true\n"
    )
    Path("plan.toml").write_text(text)
    for target in TARGETS:
        out, _ = run(capsys, "emit", "plan.toml", "--to", target)
        assert out


@pytest.mark.parametrize(
    ("model", "pattern", "own"),
    [
        ("DistributedDataParallel", "module.layers.*", "layers.*"),
        ("Generator", "Generator.layers.*", "layers.*"),
        ("Generator", "module.layers.*", "module.layers.*"),
    ],
)
def test_names_are_those_that_the_model_itself_has(model: str, pattern: str, own: str) -> None:
    """A wrapper's name and the type in front are a recording's; a module that is called module keeps its name."""
    prediction = Prediction("run.memprof", model, 0, 2, 1.0, 1, "forward", "", 1.0, "replayed")
    plan = in_own_names(Plan((Checkpoint((pattern,)),), prediction))
    assert plan == Plan((Checkpoint((own,)),), prediction)


@pytest.mark.parametrize("target", TARGETS)
def test_every_policy_is_written_or_said_to_be_missing(target: str) -> None:
    """No policy is lost on the way: what a form does not express, it names."""
    text = (
        "[shard]\nworld_size = 2\n[precision]\ndtype = 'bf16'\n[accumulate]\nmicro_batches = 2\n[loss]\n"
        "[checkpoint]\nmodules = ['layers.*']\n[swap]\n[compress]\nmodules = ['head']\n[optimizer]\nloop = 'fused'\n"
        "[compile]\nmodules = ['head']\n[remat]\nbudget = '1GiB'\n[allocator]\nexpandable_segments = true\n"
    )
    plan = parse_plan(text)
    emitted = target_named(target).emit(Request(plan, "plan.toml"))
    named = {policy.name for policy in plan.policies for each in emitted.cannot if each.startswith(policy.describe())}
    assert emitted.expressed + len(named) >= len(plan.policies)


def test_suggest_prints_its_best_plan_in_the_form(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing but the code on stdout, with the prediction in it; --write keeps the plan as ever."""
    trace = SAMPLES / "gpt" / "run.memprof"
    shutil.copy(trace, "run.memprof")
    words = ("suggest", "run.memprof", "--budget", "60%", "--time-limit", 20, "--allow", "checkpoint")
    out, _ = run(capsys, *words, "--emit", "pytorch", "--write", "best.toml")
    assert out.startswith('"""Trains under a memprof plan')
    assert "Predicted: peak " in out
    assert "from memprof suggest run.memprof" in out
    again, _ = run(capsys, "emit", "best.toml", "--to", "pytorch")
    assert again.partition("import ")[2] == out.partition("import ")[2]


def test_suggest_emits_nothing_where_there_is_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """A job that fits needs none; for one that cannot, the sentence and the exit code are those of a missed budget."""
    shutil.copy(SAMPLES / "gpt" / "run.memprof", "run.memprof")
    out, err = run(capsys, "suggest", "run.memprof", "--budget", "200%", "--emit", "hf")
    assert out == ""
    assert "already fits" in err
    words = ("suggest", "run.memprof", "--budget", "1%", "--time-limit", 5, "--allow", "checkpoint", "--emit", "hf")
    out, err = run(capsys, *words, status=4)
    assert out == ""
    assert "No plan found fits" in err
    _, err = run(capsys, "suggest", "run.memprof", "--budget", "50%", "--emit", "hf", "--json", status=2)
    assert "--emit prints one plan" in err
