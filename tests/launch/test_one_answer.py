"""Whether a job fits a card: a plan that is confirmed for the card fits by the verdict of its own dry run."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.analysis.allocator.device_verdict import dry_fit
from memprof.cli.main import main
from tests.recorder.recorded import record, record_script

#: Needs more than a T4 has only with the most that cuDNN may take.
_JOB = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64)
    def forward(self, x):
        return torch.relu(self.norm(self.conv(x))) + x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.head = nn.Linear(64, 10)
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))

net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(4):
    loss = net(torch.randn(90, 3, 128, 128, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_confirmed_plan_fits_by_the_verdict_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plans reserve too much for their tensors, which only a dry run shows: they are not kept."""
    monkeypatch.chdir(tmp_path)
    device = ("--dry-run", "--device", "t4")
    done = record_script(tmp_path, _JOB, *device)
    before = dry_fit(done.trace)
    assert before is not None
    assert before.describe().startswith("May not fit")
    words = ("--machine", "t4", "--forbid", "precision", "--check", "--write", "plan.toml")
    assert main(["suggest", str(done.trace.path), *words]) == 0
    under = record(tmp_path, *device, "--plan", "plan.toml", str(next(tmp_path.glob("*.py"))), name="under.memprof")
    after = dry_fit(under.trace)
    assert after is not None
    assert after.describe().startswith("Fits")
