"""Caches of keys and values that a model returns from every forward, under autocast and under checkpointing."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.precision.policy import Precision
from memprof.replay.live import live_bytes
from tests.recorder.recorded import record, record_script

#: Keys are turned by a table in float32, as with rotary positions; the cache begins with two empty tensors.
_JOB = """
import torch
from torch import nn

class Cache:  # an object: what a plan casts are the tensors that a model returns
    def __init__(self):
        self.layers = []

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64, bias=False) for _ in range(4))
    def forward(self, x, table, cache):
        q, k, v = self.q(x), self.k(x) TURNED, self.v(x)
        keys = torch.tensor([], dtype=k.dtype)
        values = torch.tensor([], dtype=k.dtype)
        keys = torch.cat([keys, k], dim=-2)
        values = torch.cat([values, v], dim=-2)
        cache.layers.append((keys, values))
        return x + self.o(torch.softmax(q @ keys.transpose(-1, -2), -1) @ values)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(4))
        self.register_buffer("table", torch.rand(64, 64))
    def forward(self, x):
        cache = Cache()
        for layer in self.layers:
            x = layer(x, self.table, cache)
        return x.square().mean(), cache

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.randn(8, 64, 64)
for step in range(6):
    loss = model(rows)[0]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("turned", ["* table", ""])
def test_values_are_as_wide_as_the_keys_and_held_until_the_model_returns(turned: str, tmp_path: Path) -> None:
    """Turned keys are wide, and make the values so; keys that stay short leave them short."""
    plan = Plan((Precision(dtype="bf16"),))
    step = record_script(tmp_path, _JOB.replace("TURNED", turned)).step
    predicted = int(live_bytes(plan.transform(step)).during.max())
    write_plan(tmp_path / "plan.toml", plan)
    under = record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof")
    assert abs(predicted - under.peak) <= under.peak * 0.01, (predicted, under.peak)


def test_a_cache_is_held_until_the_last_region_that_was_given_it_is_done(tmp_path: Path) -> None:
    """Torch's checkpoint keeps a region's arguments: the cache, with the keys and values of the other layers too."""
    plan = Plan((Checkpoint(modules=("layers.0", "layers.2")),))
    step = record_script(tmp_path, _JOB.replace("TURNED", "")).step
    predicted = int(live_bytes(plan.transform(step)).during.max())
    write_plan(tmp_path / "plan.toml", plan)
    assert record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof").peak == predicted
