"""Jobs that forbid or replace what the recorder needs in their process train on, and memprof says what failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memprof.errors import InconclusiveError
from memprof.trace.schema import Modules, Steps
from memprof.trace.store import Trace

TRAINS = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    for _ in range(8):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    print("trained")
"""
REPLACES = """
import builtins, io, os
def replaced(*words, **named):
    raise RuntimeError("not in this job")
def replace_all():
    for name in ("open", "mkdir", "write", "stat", "lstat", "replace", "unlink", "listdir", "scandir"):
        setattr(os, name, replaced)
    builtins.open = io.open = replaced
"""
AUDITS = """
import sys
def audit(event, words):
    if event == "open":
        raise PermissionError("no")
sys.addaudithook(audit)
train()
"""
LEAVES = """
import sys
def audit(event, words):
    if event == "import" and words[0] == "memprof.launch.child":
        raise SystemExit(7)
sys.addaudithook(audit)
"""
CASES = {
    "functions of files replaced": (
        TRAINS + REPLACES + "replace_all()\ntrain()",
        "the recorder could not start in job.py: RuntimeError: not in this job",
    ),
    "an audit hook that refuses files": (
        TRAINS + AUDITS,
        "job.py called a model, but no recorder could create a file: the disk is full, or the job forbids it",
    ),
    "an audit hook that refuses files in /proc": (
        TRAINS + AUDITS.replace('"open"', '"open" and str(words[0]).startswith("/proc")'),
        "job.py called a model, but the recorder failed: OSError: torch's profiler cannot start: PermissionError: no",
    ),
    "a hook that leaves Python while the recorder starts": (
        LEAVES + TRAINS + "train()",
        "the recorder could not start in job.py: SystemExit: 7",
    ),
}


def _record(folder: Path, job: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(job)
    words = (sys.executable, "-P", "-m", "memprof.cli.main", "record", "-q", "-o", "run.memprof", *options, "job.py")
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.cold  # they install what they forbid before the recorder starts, or before it begins
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[] if number in (0, 3) else [pytest.mark.slow]) for number, each in enumerate(CASES)],
)
def test_the_job_trains_and_memprof_says_what_failed(name: str, tmp_path: Path) -> None:
    """Status 3, and one sentence with what the job's own function raised."""
    job, reason = CASES[name]
    done = _record(tmp_path, job)
    assert (done.returncode, done.stdout) == (InconclusiveError.exit_code, "trained\n")
    said = [line for line in done.stderr.splitlines() if not line.startswith("W")]  # torch's own warnings
    assert said == [f"memprof: nothing was recorded: {reason} (it ended with status 0)."]


@pytest.mark.cold
def test_files_that_are_forbidden_at_the_end(tmp_path: Path) -> None:
    """What the recorder notes as Python ends is left out: nothing is printed, and the recording is whole."""
    done = _record(tmp_path, TRAINS + REPLACES + "train()\nreplace_all()")
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    assert len(Trace.open(tmp_path / "run.memprof").table(Steps)) > 0


UNHASHABLE = """
import torch
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
    def __eq__(self, other):
        return isinstance(other, Block)
    def forward(self, x):
        return self.inner(x)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()
    def named_modules(self, *words, **named):
        raise RuntimeError("no names")
    def forward(self, x):
        return self.second(self.first(x))
model = Net()
optimizer = torch.optim.SGD([*model.first.inner.parameters(), *model.second.inner.parameters()], lr=0.1)
for _ in range(8):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("trained")
"""


def test_modules_that_cannot_be_hashed_or_listed(tmp_path: Path) -> None:
    """Equal modules are two, and named as any other: 2 x (4 x 4 weights and 4 biases) of 4 bytes are 160 bytes."""
    done = _record(tmp_path, UNHASHABLE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    modules = Trace.open(tmp_path / "run.memprof").table(Modules)
    assert [modules.name[row] for row in range(len(modules))] == ["", "first", "first.inner", "second", "second.inner"]
    assert sum(modules.parameter_bytes) == 160


def test_a_plan_for_modules_that_cannot_be_listed(tmp_path: Path) -> None:
    """It is refused before the first step, in a sentence."""
    done = _record(tmp_path, UNHASHABLE, "--optimizer", "fused")
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr == (
        "memprof: a plan finds modules by their names, and torch cannot list those of Net: RuntimeError: no names\n"
    )
