"""Plans for jobs that hook what autograd saves themselves: torch uses the innermost hooks, so a plan's never see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.errors import PolicyError
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.compress.policy import Compress
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.remat.policy import Remat
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from tests.recorder.recorded import record, record_script

_JOB = """
import contextlib
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

class Block(nn.Module):
    def __init__(self, hooks):
        super().__init__()
        self.hooks, self.up, self.down = hooks, nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        with save_on_cpu() if self.hooks == "all" else contextlib.nullcontext():
            hidden = torch.tanh(self.up(x))
            with save_on_cpu() if self.hooks == "part" else contextlib.nullcontext():
                return x + self.down(hidden)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain, self.all, self.part, self.tail = map(Block, ("none", "all", "part", "none"))
    def forward(self, x):
        x = self.part(self.all(self.plain(x)))
        with save_on_cpu():
            return self.tail(x)

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.randn(512, 64)
for step in range(6):
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the job."""
    return tmp_path_factory.mktemp("hooks")


@pytest.fixture(scope="module")
def step(folder: Path) -> Step:
    """A step of the job without a plan."""
    return record_script(folder, _JOB).step


def _peak(step: Step) -> int:
    return int(live_bytes(step).during.max())


def test_the_recording_says_where_hooks_of_the_job_take_what_is_saved(step: Step) -> None:
    """Operators within the hooks, and calls that enter them: those of `tail` are entered around it, by the model."""
    names = step.modules.name
    forward = step.ops.phase == "forward"
    assert set(names[step.ops.module_id[step.ops.is_hooked & forward]]) == {
        *("all", "all.up", "all.down", "part", "part.down", "tail", "tail.up", "tail.down")
    }
    calls = step.module_calls
    assert set(names[calls.module_id[calls.enters_hooks]]) == {"", "all", "part"}


@pytest.mark.parametrize("policy", [Checkpoint(("all",)), Swap(("all", "tail"), to="disk"), Compress(("tail",))])
def test_a_plan_that_would_do_nothing_is_refused_with_module_and_line(step: Step, policy: Policy) -> None:
    """Its pack and unpack functions would never be called, and its prediction would promise what never comes."""
    with pytest.raises(PolicyError, match=r"^(all|tail\.up) \(job\.py:13\) runs under saved_tensors_hooks"):
        policy.transform(step)


def test_a_region_that_would_keep_a_part_is_refused(step: Step) -> None:
    """It would run again for what it saves outside of the hooks, and keep what they took."""
    with pytest.raises(PolicyError, match=r"^part \(job\.py:\d+\) runs under saved_tensors_hooks"):
        Checkpoint(("part",)).transform(step)


def test_remat_says_what_it_cannot_drop(step: Step) -> None:
    """Half of the peak, and not the cause, was named; the run ended at its first step."""
    with pytest.raises(PolicyError, match=r"cannot stay within .* remat has no effect there"):
        Remat("30%").transform(step)


@pytest.mark.parametrize("policy", [Checkpoint(("plain", "all", "tail")), Swap(("*",), to="disk")])
def test_modules_without_hooks_are_planned_exactly(folder: Path, step: Step, policy: Policy) -> None:
    """Hooks around a module take what a checkpoint is called with, those in it all; swap moves what no hooks take."""
    assert _peak(policy.transform(step)) < _peak(step)
    plan = Plan((policy,))
    write_plan(folder / "plan.toml", plan)
    under = record(folder, "--plan", "plan.toml", "job.py", name="under.memprof")
    assert abs(_peak(plan.transform(step)) - under.peak) <= 16
    assert "had no effect" not in under.stderr


def test_a_run_says_that_its_plan_had_no_effect(folder: Path, step: Step) -> None:
    """In the lines printed at its end, and in the notes of the report as JSON; the peak is that of the plain run."""
    under = record(folder, "--checkpoint", "all", "job.py", name="idle.memprof")
    assert "memprof: checkpoint all had no effect: nothing was recomputed" in under.stderr
    assert any(note.startswith("checkpoint all had no effect") for note in under.trace.manifest.notes)
    assert under.peak == _peak(step)


def test_without_the_collector_an_output_dies_with_its_last_reference() -> None:
    """The first checkpoint imports torch's compiler, which leaves cycles with all frames below it: not the job's."""
    script = """
import gc, json, weakref
import torch
import memprof
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan

gc.collect()
gc.disable()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
memprof.apply(Plan((Checkpoint((".",)),)), model)
lives = []
for _ in range(2):
    output = model(torch.zeros(4, 8))
    reference = weakref.ref(output)
    del output
    lives.append(reference() is not None)
print(json.dumps(lives))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True)
    assert json.loads(done.stdout) == [False, False]
