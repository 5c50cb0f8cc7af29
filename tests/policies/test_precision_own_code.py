"""Jobs whose own code depends on autocast, or recomputes activations: predicted under precision as measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.precision.policy import Precision
from memprof.policies.rewrite.recomputed import read_of_unfinished_runs
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE, Modules, Ops, Uses
from tests.policies.faces import recorded
from tests.recorder.recorded import record, record_script

#: A loss in parts, in a function of its own: its buffers have autocast's type, in forward and in backward.
_PARTS = """
import torch
from torch import nn

class PartedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight):
        kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
        buffer = torch.empty(hidden.shape[0], weight.shape[0], dtype=kind)
        torch.mm(hidden.to(kind), weight.to(kind).t(), out=buffer)
        ctx.save_for_backward(hidden, weight)
        ctx.kind = kind
        return buffer.float().square().mean()

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        buffer = torch.empty(hidden.shape[0], weight.shape[0], dtype=ctx.kind)
        short, small = hidden.to(ctx.kind), weight.to(ctx.kind)
        torch.mm(short, small.t(), out=buffer)
        scale = 2 * gradient / buffer.numel()
        return (buffer @ small).to(hidden.dtype) * scale, (buffer.t() @ short).to(weight.dtype) * scale

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.LayerNorm(32))
        self.head = nn.Parameter(torch.randn(4096, 32) * 0.05)
    def forward(self, x):
        return PartedLoss.apply(self.body(x), self.head)

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.randn(256, 32)
for step in range(6):
    loss = model(rows)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
#: Layers that the job checkpoints itself. A variable of a layer holds what attention returns beside its result, and the
#: recomputation stops before the last product.
_RECOMPUTES = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Linear(32, 64)
    def forward(self, x):
        key, value = self.both(x).chunk(2, -1)
        scores = key @ key.transpose(-1, -2)
        weights = torch.softmax(scores, -1, dtype=torch.float32)
        return weights @ value, weights

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), Attention()
        self.up, self.down = nn.Linear(32, 256, bias=False), nn.Linear(256, 32, bias=False)
    def forward(self, x):
        mixed, _ = self.attention(x)
        return self.down(torch.relu(self.up(self.norm(x + mixed))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(32, 8)
    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.randn(4, 128, 32)
for step in range(6):
    loss = model(rows).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
#: A variable holds what is cast to the type of a weight, in place of what it is cast from, until the function ends.
_CASTS_BEFORE_PRODUCT = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 512), nn.Linear(512, 32)
        self.dropout = nn.Dropout(0.1)
    def forward(self, x):
        x = self.dropout(torch.relu(self.up(x)))
        x = x.to(self.down.weight.dtype)
        x = self.down(x)
        return x

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = Layer(), nn.Dropout(0.1)
    def forward(self, x):
        return self.dropout(self.layer(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) + x
        return x

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.randn(512, 32)
for step in range(6):
    loss = model(rows).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
#: Only the part that the product reads is cast.
_CASTS_PART = _CASTS_BEFORE_PRODUCT.replace("nn.Linear(32, 512)", "nn.Linear(32, 2048)").replace(
    "self.dropout(torch.relu(self.up(x)))", "torch.relu(self.up(x)).chunk(4, -1)[1]"
)


#: A norm that computes in float32, and blocks that a function of the job's runs again in backward, which restores no
#: autocast, as diffusion models have them.
_OWN_CHECKPOINT = """
import torch
from torch import nn

class RunAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, count, *given):
        ctx.run, ctx.inputs, ctx.parameters = run, list(given[:count]), list(given[count:])
        with torch.no_grad():
            return run(*ctx.inputs)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [each.detach().requires_grad_(True) for each in ctx.inputs]
        with torch.enable_grad():
            output = ctx.run(*[each.view_as(each) for each in inputs])
        found = torch.autograd.grad(output, inputs + ctx.parameters, gradient, allow_unused=True)
        return None, None, *found

class WideNorm(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)

class Block(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.norm, self.conv, self.again = WideNorm(4, 32), nn.Conv2d(32, 32, 3, padding=1), again
    def forward(self, x):
        if self.again:
            return RunAgain.apply(self.block, 1, x, *self.parameters())
        return self.block(x)
    def block(self, x):
        return x + self.conv(torch.nn.functional.silu(self.norm(x)))

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), Block(False), Block(True), Block(False), Block(True))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
pictures = torch.randn(8, 3, 32, 32)
for step in range(6):
    loss = model(pictures).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

#: The same, whose backward leaves it to another function.
_HELPED_CHECKPOINT = _OWN_CHECKPOINT.replace(
    "        with torch.enable_grad():\n            output = ctx.run(*[each.view_as(each) for each in inputs])\n",
    "        output = run_again(ctx, inputs)\n",
).replace(
    "class RunAgain",
    "def run_again(ctx, inputs):\n    with torch.enable_grad():\n"
    "        return ctx.run(*[each.view_as(each) for each in inputs])\n\n"
    "class RunAgain",
)


@pytest.mark.parametrize(
    "job",
    [_PARTS, _RECOMPUTES, _CASTS_BEFORE_PRODUCT, _CASTS_PART, _OWN_CHECKPOINT, _HELPED_CHECKPOINT],
    ids=[
        "parts of a loss",
        "checkpointed layers",
        "cast before a product",
        "part cast before a product",
        "own checkpoint",
        "own checkpoint in a function of its own",
    ],
)
def test_peak_under_autocast(tmp_path: Path, job: str) -> None:
    """Within a hundredth, which is what a processor's kernels take beside tensors."""
    plan = Plan((Precision(dtype="bf16"),))
    step = record_script(tmp_path, job).step
    write_plan(tmp_path / "plan.toml", plan)
    under = record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof").step
    predicted, measured = (int(live_bytes(one).during.max()) for one in (plan.transform(step), under))
    assert abs(predicted - measured) <= measured / 100, (predicted, measured)


def test_backward_outside_modules_reads_no_unfinished_recomputation():
    """An operator outside modules is not one of a module that a recomputation prepared, whatever storage it reads."""
    ops = Ops.of(
        op_id=[0, 1, 2],
        module_id=[NONE, 1, NONE],
        is_recompute=[False, True, False],
        phase=["forward"] + ["backward"] * 2,
    )
    uses = Uses.of(op_id=[1, 2], storage_id=[0, 1], role=["read", "read"])
    region, forward, origin = (np.array(values) for values in ([0, 1, NONE], [NONE, NONE, 0], [0, 1, 0]))
    step = dataclasses.replace(recorded("gpt"), ops=ops, uses=uses, modules=Modules.of(module_id=[0, 1]))
    assert not read_of_unfinished_runs(step, region, forward, origin).any()
    inside = dataclasses.replace(
        step, ops=ops.replace(module_id=np.array([1, 1, 1])), uses=uses.replace(storage_id=np.array([0, 0]))
    )
    assert read_of_unfinished_runs(inside, region, forward, origin).tolist() == [False, True]
