"""The summary printed after a job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memprof.launch.outcome.verdict import Verdict, describe_missed, describe_nothing, describe_status
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan


def test_status_in_words() -> None:
    """Signals are named, real-time signals numbered, statuses told."""
    assert describe_status(0) == "it ended with status 0"
    assert describe_status(255) == "it ended with status 255"
    assert describe_status(-15) == "it was killed by SIGTERM"
    assert describe_status(-40) == "it was killed by signal 40"


@pytest.mark.parametrize(
    ("marks", "reason"),
    [
        ((), "ran no Python that loads the recorder"),
        (("python-started",), "never imported torch"),
        (("python-started", "torch-imported"), "never called a model or an optimizer, nor ran backward"),
        (("python-started", "torch-imported", "process-7/"), "no recorder could create a file"),
        (("python-started", "torch-imported", "process-7/", "process-7/rows"), "ended before the first operator"),
    ],
)
def test_how_far_a_job_came(tmp_path: Path, marks: tuple[str, ...], reason: str) -> None:
    """The marks in the spool show how far the job came."""
    for mark in marks:
        if mark.endswith("/"):
            (tmp_path / mark).mkdir()
        else:
            (tmp_path / mark).touch()
    verdict = describe_nothing(tmp_path, "train.py", 1)
    assert verdict.sentence.startswith("nothing was recorded: ")
    assert reason in verdict.sentence
    assert verdict.sentence.endswith("(it ended with status 1).")
    assert verdict.next_command == ""


@pytest.mark.parametrize("log", ["bootstrap-7.log", "recorder-7.log"])
def test_fault_of_the_recorder_is_told(tmp_path: Path, log: str) -> None:
    """The last line of a log is the reason, whatever else is there."""
    (tmp_path / "python-started").touch()
    (tmp_path / log).write_text("Traceback (most recent call last):\n  File\nOSError: no space\n\n")
    assert "the recorder could not start in train.py: OSError: no space" in str(
        describe_nothing(tmp_path, "train.py", 0)
    )


def test_a_job_that_removed_the_recorders_folder(tmp_path: Path) -> None:
    """The reason names the folder, and blames no interpreter."""
    sentence = describe_nothing(tmp_path / "run.memprof.spool", "train.py", 0).sentence
    assert sentence == (
        f"nothing was recorded: {tmp_path}/run.memprof.spool, to which recorders write, was removed while train.py ran "
        "(it ended with status 0)."
    )


def test_verdict_on_the_terminal() -> None:
    """Each line has memprof's name, to distinguish it from the job's own output."""
    assert str(Verdict("a", "memprof report b")) == "memprof: a\nmemprof: next: memprof report b"
    assert str(Verdict("a")) == "memprof: a"


def test_policies_that_met_no_model_are_named() -> None:
    """A plan that was applied in part says which policies were not; one applied whole, or empty, says nothing."""
    plan = Plan((Checkpoint(modules=("a.*",)), Checkpoint(modules=("b.*",))))
    assert describe_missed(plan, {0, 1}) == []
    assert describe_missed(plan, {0}) == ["policies not applied to any model called in training: checkpoint b.*."]
    assert describe_missed(plan, set()) == ["the plan was not applied: no model of the job was called in training."]
    assert describe_missed(Plan(), set()) == []


def test_a_light_run_that_the_jobs_own_profiler_had_throughout(tmp_path: Path) -> None:
    """Its steps were counted; the sentence says that none was recorded in full, and of no warm-up."""
    (tmp_path / "job.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "with torch.profiler.profile():\n"
        "    for _ in range(3):\n"
        "        model(torch.ones(2, 4)).sum().backward()\n"
        "        optimizer.step()\n"
    )
    words = [sys.executable, "-m", "memprof", "record", "--light", "-o", "run.memprof", "job.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "memprof: followed job.py: of 3 steps, step " in done.stderr
    assert ". No step was recorded in full. run.memprof holds " in done.stderr
