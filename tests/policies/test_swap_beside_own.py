"""Swapping beside modules that the job checkpoints itself, which keep their inputs and what they save themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.policies.base import Policy
from memprof.policies.compress.policy import Compress
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes
from tests.recorder.recorded import record, record_script

_JOB = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.act = nn.SiLU(inplace=True)
    def forward(self, x):
        return x + self.act(self.norm(self.conv(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # The input of the blocks is changed in place by the last operator of the stem.
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.SiLU(inplace=True))
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(16, 10)
    def forward(self, x):
        x = checkpoint(self.blocks, self.stem(x), use_reentrant=False)
        return self.head(x.mean((2, 3)))

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.randn(8, 3, 32, 32)
for step in range(6):
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("modules", [("stem",), ("stem.2",), ("blocks",), ("*",), (".",)])
def test_a_region_keeps_what_its_input_became(modules: tuple[str, ...], tmp_path: Path) -> None:
    """Hooks around a region see its input; those of a module that is run again see nothing, since it has its own."""
    plan = Plan((Swap(modules=modules, to="disk"),))
    step = record_script(tmp_path, _JOB).step
    predicted = int(live_bytes(plan.transform(step)).during.max())
    write_plan(tmp_path / "plan.toml", plan)
    under = record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof")
    assert abs(predicted - under.peak) <= 16


_FORWARD = "x = checkpoint(self.blocks, self.stem(x), use_reentrant=False)"
_EACH = """x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant={})"""


@pytest.mark.parametrize(
    ("is_reentrant", "policy"),
    [
        (True, Swap(modules=("*",), to="disk")),
        (False, Compress(modules=(".",))),
        pytest.param(True, Compress(modules=(".",)), marks=pytest.mark.slow),
        pytest.param(True, Swap(modules=("blocks.1", "stem"), to="disk"), marks=pytest.mark.slow),
    ],
)
def test_inputs_of_regions_are_unpacked_and_what_reentrant_ones_save_is_packed(
    is_reentrant: bool, policy: Policy, tmp_path: Path
) -> None:
    """A region's second run reads what was unpacked; hooks of its modules pack what a reentrant one saves then."""
    step = record_script(tmp_path, _JOB.replace(_FORWARD, _EACH.format(is_reentrant))).step
    plan = Plan((policy,))
    predicted = int(live_bytes(plan.transform(step)).during.max())
    write_plan(tmp_path / "plan.toml", plan)
    under = record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof")
    assert abs(predicted - under.peak) <= 16
