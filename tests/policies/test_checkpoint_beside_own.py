"""Checkpointing beside modules that the job checkpoints itself, as timm's and transformers' switches do."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.replay.live import live_bytes
from tests.recorder.recorded import record, record_script

_JOB = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)
    def forward(self, x):
        return self.norm(self.second(F.gelu(self.first(x))))[:, None].squeeze(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.tail = Stem(), nn.ModuleList(Block() for _ in range(3)), Block()
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
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


@pytest.mark.parametrize("modules", [("stem",), ("tail",), ("stem", "tail"), ("stem.first", "stem.norm")])
def test_what_runs_again_by_itself_keeps_its_input(modules: tuple[str, ...], tmp_path: Path) -> None:
    """The output of a module that is run again is the input of one that the job runs again: it is held until then."""
    plan = Plan((Checkpoint(modules=modules),))
    step = record_script(tmp_path, _JOB).step
    predicted = int(live_bytes(plan.transform(step)).during.max())
    write_plan(tmp_path / "plan.toml", plan)
    under = record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof")
    assert abs(predicted - under.peak) <= 16
