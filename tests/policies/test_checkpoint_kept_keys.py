"""Caches of keys and values that a model returns from every forward, under checkpointing."""

from __future__ import annotations

from pathlib import Path

from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.replay.live import live_bytes
from tests.recorder.recorded import record, record_script

#: The cache begins with two empty tensors.
_JOB = """
import torch
from torch import nn

class Cache:  # an object, as transformers' is
    def __init__(self):
        self.layers = []

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64, bias=False) for _ in range(4))
    def forward(self, x, cache):
        q, k, v = self.q(x), self.k(x), self.v(x)
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
    def forward(self, x):
        cache = Cache()
        for layer in self.layers:
            x = layer(x, cache)
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


def test_a_cache_is_held_until_the_last_region_that_was_given_it_is_done(tmp_path: Path) -> None:
    """Torch's checkpoint keeps a region's arguments: the cache, with the keys and values of the other layers too."""
    plan = Plan((Checkpoint(modules=("layers.0", "layers.2")),))
    step = record_script(tmp_path, _JOB).step
    predicted = int(live_bytes(plan.transform(step)).during.max())
    write_plan(tmp_path / "plan.toml", plan)
    assert record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof").peak == predicted
