"""What autocast's copies hold: views of weights and of parts of activations, and what the job casts to other types."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.precision.policy import Precision
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from tests.policies.faces import compare
from tests.recorder.recorded import record, record_script

#: A layer that transposes its weight itself, products of a whole tensor with a part of another, and probabilities cast
#: to the type of an argument.
_JOB = """
import torch
from torch import nn

class Turned(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outside, inside) * 0.05)
    def forward(self, x):
        return x @ self.weight.T

def attend(scores, value):
    weights = torch.softmax(scores, -1)
    weights = weights.type(value.dtype)
    weights = nn.functional.dropout(weights, p=0.1)
    return weights @ value

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(Turned(64, 512), nn.GELU(), Turned(512, 64))
        self.both = nn.Linear(64, 192)
        self.register_buffer("mask", torch.zeros(32, 32))
    def forward(self, x):
        scores = self.both(x)
        x = x @ scores[..., 128:].transpose(-1, -2)
        x = attend(x + self.mask, scores[..., :64])
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


def test_copies_at_the_end_of_forward(tmp_path: Path) -> None:
    """Autocast caches copies of weights, not of their transposes: those of a checkpointed forward are freed with it.

    Of the other copies, backward keeps those of the parts read, and probabilities in the short type.
    """
    plan = Plan((Precision(dtype="bf16"), Checkpoint(modules=("*.mlp",))))
    step = record_script(tmp_path, _JOB).step
    write_plan(tmp_path / "plan.toml", plan)
    under = record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof").step
    predicted, measured = (_at_last_layer(one) for one in (plan.transform(step), under))
    assert abs(predicted - measured) <= 4096, (predicted, measured)


def _at_last_layer(step: Step) -> int:
    """Returns the bytes alive while the forward of the last layer runs."""
    is_last = (step.ops.phase == "forward") & (step.ops.name == "aten.addmm.default")
    return int(live_bytes(step).during[np.flatnonzero(is_last)[-1]])


#: Products with a matrix that the caller has expanded over the batch, and with one that the product expands itself.
_EXPANDED = """
import torch
from torch import nn

class Projected(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("matrix", torch.randn(48, 64))
        self.inner = nn.Linear(64, 64)
    def forward(self, x):
        x = self.inner(x)
        y = x @ self.matrix.t().expand(x.shape[0], x.shape[1], -1, -1)
        return torch.relu(y) @ self.matrix[None, None]

torch.manual_seed(0)
model = nn.Sequential(Projected(), Projected())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.randn(16, 4, 8, 64)
for step in range(6):
    loss = model(rows).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_copy_of_an_expanded_tensor_has_all_its_elements(tmp_path: Path) -> None:
    """Autocast copies what it is given; what a product expands by itself comes after the copy."""
    plan = Plan((Precision(dtype="bf16"),))
    step = record_script(tmp_path, _EXPANDED).step
    write_plan(tmp_path / "plan.toml", plan)
    under = record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof").step
    predicted, measured = (int(live_bytes(one).during.max()) for one in (plan.transform(step), under))
    assert predicted == measured, compare(plan.transform(step), under)


#: The largest features of points, to which their places are appended: what goes back is a part of a gradient.
_POINTS = """
import torch
from torch import nn

class Points(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Conv2d(3, 64, 1), nn.Linear(67, 16)
    def forward(self, x):
        largest = torch.relu(self.inner(x)).max(2)[0]
        return self.outer(torch.cat([x[:, :, 0], largest], 1).transpose(1, 2))

torch.manual_seed(0)
model = Points()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.randn(4, 3, 32, 64)
for step in range(6):
    loss = model(rows).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_part_of_a_gradient_is_scattered_in_float32(tmp_path: Path) -> None:
    """As many elements are scattered as the index has, though the gradient that they are a part of has more."""
    plan = Plan((Precision(dtype="bf16"),))
    step = record_script(tmp_path, _POINTS).step
    write_plan(tmp_path / "plan.toml", plan)
    under = record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof").step
    predicted, measured = (int(live_bytes(one).during.max()) for one in (plan.transform(step), under))
    assert abs(predicted - measured) <= 4096, compare(plan.transform(step), under)
