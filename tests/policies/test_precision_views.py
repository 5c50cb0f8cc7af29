"""Views of weights and of parts of activations under autocast: what is cast, and until when the copy lives."""

from __future__ import annotations

from pathlib import Path

from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.precision.policy import Precision
from memprof.replay.live import live_bytes
from tests.recorder.recorded import record, record_script

#: A layer that transposes its weight itself, and products of a whole tensor with a part of another.
_JOB = """
import torch
from torch import nn

class Turned(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outside, inside) * 0.05)
    def forward(self, x):
        return x @ self.weight.T

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(Turned(64, 512), nn.GELU(), Turned(512, 64))
        self.both = nn.Linear(64, 192)
    def forward(self, x):
        scores = self.both(x)
        gate = torch.softmax(x, -1)
        x = gate @ scores[..., 128:].transpose(-1, -2) @ scores[..., :64]
        return x + self.mlp(x)

torch.manual_seed(0)
model = nn.Sequential(Layer(), Layer(), Layer(), nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.randn(4, 32, 64)
for step in range(6):
    loss = model(rows).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_views_are_cast_alone_and_their_copies_are_not_cached(tmp_path: Path) -> None:
    """Autocast caches copies of weights, not of their transposes: those of a checkpointed forward are freed with it."""
    plan = Plan((Precision(dtype="bf16"), Checkpoint(modules=("*.mlp",))))
    step = record_script(tmp_path, _JOB).step
    predicted = int(live_bytes(plan.transform(step)).during.max())
    write_plan(tmp_path / "plan.toml", plan)
    under = record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof")
    assert abs(predicted - under.peak) <= under.peak * 0.005, (predicted, under.peak)
