"""`memprof diff` of two recordings and of one, and the summaries that stand for them, as they are typed and read."""

from __future__ import annotations

import dataclasses
import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memprof.analysis.diff.comparison import Change, compare, open_side
from memprof.cli.main import main
from memprof.trace.schema import NONE, TABLES, Modules, Stacks, Storages
from memprof.trace.store import Trace, write_trace
from tests.trace.importers.writing import FORWARD, MIB, TRAIN, block, entry, frame, freed, segment, snapshot, write

SAMPLES = Path(__file__).parent.parent.parent / "sample_traces"
PEAK = 93_237_072
EXTRA = 1 << 20


def rewrite(
    to: str, *, extra: int = 0, made_bytes: int = 0, modules: Any = None, stacks: Any = None, **changes: Any
) -> None:
    """Writes the recording again: with more bytes in one parameter, other names, another manifest."""
    trace = Trace.open(SAMPLES / "gpt" / "run.memprof")
    tables: dict[Any, Any] = {kind: trace.table(kind) for kind in TABLES}
    storages = tables[Storages]
    row = int(np.flatnonzero((storages.category == "parameter") & (storages.freed_op_id == NONE))[0])
    larger = storages.allocated_bytes.copy()
    larger[row] += extra
    is_made = (storages.category == "activation") & (storages.created_op_id != NONE)
    larger[is_made & (larger == larger[is_made].max())] += made_bytes
    tables[Storages] = storages.replace(allocated_bytes=larger)
    if modules is not None:
        tables[Modules] = tables[Modules].replace(**modules(tables[Modules]))
    if stacks is not None:
        tables[Stacks] = tables[Stacks].replace(**stacks(tables[Stacks]))
    write_trace(to, [(dataclasses.replace(trace.manifest, **changes), tables)])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    shutil.copy(SAMPLES / "gpt" / "run.memprof", "base.memprof")
    rewrite("head.memprof", extra=EXTRA)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    assert main(list(map(str, words))) == status
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out if status in (0, 4) else captured.err


def told(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> dict[str, Any]:
    found = json.loads(run(capsys, "diff", *words, "--format", "json", status=status))
    assert isinstance(found, dict)
    return found


def test_gates_decide_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """4 where one fails, 0 where it only warns; those of pyproject.toml count where no flag names any."""
    pair = ("diff", "base.memprof", "head.memprof")
    page = run(capsys, *pair, "--fail-on", "peak>+1%", status=4)
    assert "FAILED: gate peak>+1%: peak 88.92 MiB -> 89.92 MiB (+1.00 MiB, +1.1 %)" in page
    page = run(capsys, *pair, "--warn-on", "peak>+1%", "--fail-on", "peak>+2%&+1KiB")
    assert "warning: gate peak>+1%" in page
    assert "passed: peak>+2%&+1KiB" in page
    page = run(capsys, *pair, "--warn-on", "reserved-allocated>+1GiB")
    assert "reserved-allocated is unknown on at least one side" in page
    Path("pyproject.toml").write_text("[tool.memprof.gates]\nfail = ['parameter>+512KiB']\n")
    assert "FAILED: gate parameter>+512KiB" in run(capsys, *pair, status=4)
    run(capsys, *pair, "--fail-on", "peak>+50%")
    Path("pyproject.toml").write_text("[tool.memprof.gates]\nfail = ['parameter>>']\n")
    assert "pyproject.toml: invalid gate 'parameter>[here]>'" in run(capsys, *pair, status=2)
    Path("pyproject.toml").write_text("[tool.memprof.gates]\nfails = []\n")
    assert "has no key fails" in run(capsys, *pair, status=2)


def test_summary_stands_for_its_recording(capsys: pytest.CaptureFixture[str]) -> None:
    """A few kilobytes, against which a recording shows the same change as against the whole."""
    run(capsys, "export", "base.memprof", "--to", "summary", "-o", "base.json")
    assert Path("base.json").stat().st_size < 20_000
    assert "/" not in "".join(json.loads(Path("base.json").read_text())["lines"])
    assert told(capsys, "base.json", "base.memprof")["is_unchanged"]
    found = told(capsys, "base.json", "head.memprof")
    assert found["peak"]["change_bytes"] == EXTRA
    for pair in (found["peak"], *found["phases"]):
        for parts in pair["parts"].values():
            assert sum(part["change_bytes"] for part in parts) == EXTRA


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{}", "it has no key memprof_summary"),
        ('{"memprof_summary": 99}', "a summary of version 99"),
        ('{"memprof_summary": 1}', "is damaged"),
        ("{", "neither a recording nor JSON"),
        ("no recording", "base.json"),
    ],
)
def test_broken_baseline_is_one_sentence(capsys: pytest.CaptureFixture[str], text: str, sentence: str) -> None:
    """Exit code 5, what was read and what is wrong with it."""
    Path("base.json").write_text(text)
    message = run(capsys, "diff", "base.json", "head.memprof", status=5)
    assert sentence in message
    assert len(message.strip().splitlines()) == 1


def test_recordings_that_do_not_compare_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Another torch or another model: exit code 3 with what differs, numbers only where that is ignored."""
    rewrite("newer.memprof", torch_version="9.9")
    message = run(capsys, "diff", "base.memprof", "newer.memprof", status=3)
    assert "torch is 2.13.0+cpu in the base and 9.9 now" in message
    assert "--ignore torch" in message
    page = run(capsys, "diff", "base.memprof", "newer.memprof", "--ignore", "torch")
    assert "warning: torch is 2.13.0+cpu in the base and 9.9 now" in page
    assert "known are device, torch" in run(capsys, "diff", "base.memprof", "head.memprof", "--ignore", "x", status=2)
    shutil.copy(SAMPLES / "lstm" / "run.memprof", "other.memprof")
    message = run(capsys, "diff", "base.memprof", "other.memprof", status=3)
    assert "the base is of GPT, the head of LanguageModel" in message


def test_prediction_compares_with_what_it_was_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    """A predicted trace is a side like any other, and the plan is the cause that is named."""
    run(capsys, "predict", "base.memprof", "--checkpoint", "layers.*", "-o", "predicted.memprof")
    found = told(capsys, "base.memprof", "predicted.memprof")
    assert found["peak"]["change_bytes"] < 0
    assert found["differences"] == []
    assert found["causes"][0]["kind"] == "plan"


def test_markdown_is_a_comment_with_its_marker_last(capsys: pytest.CaptureFixture[str]) -> None:
    """It fits a comment whatever the names, and nothing from a trace is markup."""
    evil = "<img src=x onerror=alert(1)> | `x` \n# heading [a](b)" * 40

    def renamed(modules: Any) -> dict[str, Any]:
        names = modules.name.copy()
        names[1:] = [f"{evil}{row}" for row in range(1, len(names))]
        return {"name": names}

    rewrite("evil.memprof", extra=EXTRA, modules=renamed)
    run(capsys, "diff", "base.memprof", "evil.memprof", "--format", "markdown", "-o", "comment.md", "--rows", "500")
    text = Path("comment.md").read_text()
    assert text.splitlines()[-1] == "<!-- memprof-diff -->"
    assert len(text) <= 60_000
    assert "<img" not in text
    assert "\n# heading" not in text
    page = run(capsys, "diff", "base.memprof", "evil.memprof", "--format", "html")
    assert "<img" not in page
    assert "default-src 'none'" in page


def test_github_annotates_the_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An error at the file and line that made most of the change, and the tables in the job's summary."""
    trace = Trace.open("base.memprof")
    frames = trace.table(Stacks).frames
    first = next(text for text in frames if "train.py" in text)
    path = next(line for line in first.splitlines() if "train.py" in line).rpartition("train.py")[0]
    here = f"{Path.cwd()}/"

    def moved(stacks: Any) -> dict[str, Any]:
        return {"frames": np.array([text.replace(path, here) for text in stacks.frames], dtype=object)}

    rewrite("base.memprof", stacks=moved)
    rewrite("head.memprof", stacks=moved, made_bytes=EXTRA)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    out = run(capsys, "diff", "base.memprof", "head.memprof", "--format", "github", "--fail-on", "peak>+1%", status=4)
    assert out.startswith("::error file=train.py,line=")
    assert "title=memprof gate peak>+1%25::peak 88.92 MiB -> 96.92 MiB" in out
    assert "### Memory" in Path("summary.md").read_text()
    out = run(capsys, "diff", "base.memprof", "base.memprof", "--format", "github")
    assert out.startswith("::notice title=memprof::Nothing changed")


def test_junit_has_a_case_for_each_gate(capsys: pytest.CaptureFixture[str]) -> None:
    """Failed, warned and unknown gates are distinguished."""
    gates = ("--fail-on", "peak>+1%", "--fail-on", "peak>+90%", "--warn-on", "peak>+1KiB", "--warn-on", "reserved>1GiB")
    text = run(capsys, "diff", "base.memprof", "head.memprof", *gates, "--format", "junit", status=4)
    suite = ET.fromstring(text).find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "1", "1")
    cases = {case.get("name"): [child.tag for child in case] for case in suite}
    assert cases == {
        "peak>+1%": ["failure"],
        "peak>+90%": ["system-out"],
        "peak>+1KiB": ["system-out"],
        "reserved>1GiB": ["skipped"],
    }


def test_benchmark_form_is_a_list_of_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """As github-action-benchmark reads it: name, unit, value, where smaller is better."""
    figures = json.loads(run(capsys, "diff", "base.memprof", "head.memprof", "--format", "benchmark"))
    assert {"name": "peak allocated", "unit": "bytes", "value": PEAK + EXTRA} in figures
    assert all(set(figure) == {"name", "unit", "value"} for figure in figures)


def test_explain_names_the_cause_and_the_modules(capsys: pytest.CaptureFixture[str]) -> None:
    """In words, the likeliest first."""
    page = run(capsys, "diff", "base.memprof", "head.memprof", "--explain")
    assert "1. +1.00 MiB of parameter memory in forward" in page
    assert "90 % of the change in peak is in: " in page


def test_check_needs_no_base(capsys: pytest.CaptureFixture[str]) -> None:
    """Within is 0, above is 4, nothing to check and gates of growth are mistakes."""
    out = run(capsys, "diff", "base.memprof", "--budget", "1GiB")
    assert out.startswith("peak 88.92 MiB in forward (aten.nll_loss_forward.default), train.py:102")
    assert "passed: peak 88.92 MiB <= 1.00 GiB" in out
    out = run(capsys, "diff", "base.memprof", "--budget", "80MiB", status=4)
    assert "FAILED" in out
    assert "next: memprof suggest base.memprof --budget 80MiB" in out
    told_json = json.loads(run(capsys, "diff", "base.memprof", "--fail-on", "phase:backward>1MiB", "--json", status=4))
    assert told_json["is_failed"]
    assert "nothing to compare base.memprof with" in run(capsys, "diff", "base.memprof", status=2)
    message = run(capsys, "diff", "base.memprof", "--fail-on", "peak>+2%", status=2)
    assert "limits growth, which needs a base: memprof diff base.memprof base.memprof" in message
    Path("pyproject.toml").write_text("[tool.memprof.gates]\nfail = ['peak>+2%', 'peak>80MiB']\n")
    run(capsys, "diff", "base.memprof", status=4)


def test_one_file_of_two_imported_snapshots(capsys: pytest.CaptureFixture[str]) -> None:
    """--by file and --by folder sum the lines, also after an edit above the model's moved them; other tables go."""
    for name, line, size in (("before", 3, MIB), ("after", 5, 3 * MIB)):
        frames = [frame(f"/job/model/net.py:{line}", "forward"), *FORWARD[1:]]
        history = [entry("alloc", 0, MIB, TRAIN), entry("alloc", MIB, size, frames), *freed(MIB, size)]
        write(Path(f"{name}.pickle"), snapshot([segment(0, block(MIB))], history))
        run(capsys, "import", f"{name}.pickle")
    words = run(capsys, "diff", "before.memprof", "after.memprof", "--by", "file")
    assert [line.split()[:5] for line in words.splitlines() if line.startswith(("model/", "train.py"))] == [
        ["model/net.py", "1.00", "MiB", "3.00", "MiB"]
    ]
    assert "by line of code" not in words
    words = run(capsys, "diff", "before.memprof", "after.memprof", "--by", "folder", "--format", "markdown")
    assert "What changed, by folder" in words
    focus = compare([open_side("before.memprof")], [open_side("after.memprof")]).focus
    assert focus.parts["file"] == (Change("model/net.py", MIB, 3 * MIB), Change("train.py", MIB, MIB))
    assert focus.parts["folder"] == (Change("model/", MIB, 3 * MIB), Change("./", MIB, MIB))
