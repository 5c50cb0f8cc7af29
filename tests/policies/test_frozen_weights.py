"""Weights that are not trained, as under LoRA: autocast caches no copy of them, and predictions follow that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.rewrite.autocast_cache import cached_until, frozen_parameters
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes
from tests.recorder.recorded import Ended, record

_JOB = """
import torch
from torch import nn
from torch.nn import functional as F

class Adapted(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(width, out), nn.Linear(width, 4), nn.Linear(4, out)
        self.base.requires_grad_(False)
    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Adapted(64, 256), Adapted(256, 64)
    def forward(self, x):
        return x + self.second(F.relu(self.first(x)))

torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(4)))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
rows = torch.randn(32, 64)
for step in range(6):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(rows).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
"""


def trained(folder: Path) -> Ended:
    (folder / "job.py").write_text(_JOB)
    return record(folder, "job.py")


@pytest.mark.parametrize(
    "policy", [Swap(modules=("0", "1", "2"), to="disk"), Checkpoint(modules=("0", "1", "2"))], ids=lambda one: one.name
)
def test_copies_of_frozen_weights_are_predicted(policy: Policy, tmp_path: Path) -> None:
    """The predicted peak is the measured one; with frozen weights in the cache, most would be too high."""
    plain = trained(tmp_path)
    plan = Plan((policy,))
    write_plan(tmp_path / "plan.toml", plan)
    under = record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof")
    predicted = int(live_bytes(plan.transform(plain.step)).during.max())
    assert abs(predicted - under.peak) <= 16, (predicted, under.peak)


def test_frozen_weights_are_found(tmp_path: Path) -> None:
    """They are those without a gradient in any step, and no copy of them is cached."""
    step = trained(tmp_path).step
    storages = step.storages
    frozen = {str(name) for name in storages.name[frozen_parameters(step)]}
    assert frozen == {
        f"{block}.{layer}.base.{kind}"
        for block in range(4)
        for layer in ("first", "second")
        for kind in ("weight", "bias")
    }
    cached = np.flatnonzero(cached_until(step, np.zeros(len(storages), dtype=np.bool_)) != -1)
    assert len(cached) == 4 * 2 * 4  # two adapted layers in each of four blocks, each with four trained parameters


def test_weights_without_a_gradient_that_require_one_are_cached(tmp_path: Path) -> None:
    """As a target network's that is a copy of the model: autocast keeps casts of them, also without gradients."""
    job = _JOB.replace("        self.base.requires_grad_(False)\n", "")
    job = job.replace(
        "return self.base(x) +", "with torch.no_grad():\n            y = self.base(x)\n        return y +"
    )
    (tmp_path / "job.py").write_text(
        job.replace("[p for p in model.parameters() if p.requires_grad]", "model.parameters()")
    )
    step = record(tmp_path, "job.py").step
    assert not frozen_parameters(step).any()


def test_an_unused_parameter_leaves_frozen_weights_frozen(tmp_path: Path) -> None:
    """The optimizer has a parameter without a gradient, but the base weights require none and are not cached."""
    job = _JOB.replace("optimizer =", "model.register_parameter('unused', nn.Parameter(torch.ones(3)))\noptimizer =")
    (tmp_path / "job.py").write_text(job)
    step = record(tmp_path, "job.py").step
    assert frozen_parameters(step).sum() == 4 * 2 * 2
