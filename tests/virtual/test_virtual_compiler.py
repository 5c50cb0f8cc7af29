"""What TorchDynamo meets in a dry run on a virtual GPU is what it meets in a real run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.recorder.recorded import record_script

_CARD = ("--dry-run", "--device", "h100-80g")
_MODULES = """
import torch, torch._dynamo  # before the first module
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(3)])
    def forward(self, x):
        if isinstance(x, torch._subclasses.FakeTensor):
            raise ValueError("traced")
        for layer in self.layers[1:]:  # makes a module
            x = layer(x).relu()
        return x
model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model, fullgraph=True)
for step in range(3):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        compiled(torch.randn(1024, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""
_WRAPPED = """
import torch
from torch import nn
from torch.utils._pytree import tree_map
class Halves(torch.Tensor):
    @staticmethod
    def __new__(cls, low, high):
        size = (2 * low.shape[0], *low.shape[1:])
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=low.dtype, device=low.device)
    def __init__(self, low, high):
        self.low, self.high = low, high
    def __tensor_flatten__(self):
        return ["low", "high"], None
    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["low"], inner["high"])
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = lambda value: torch.cat([value.low, value.high]) if isinstance(value, cls) else value
        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
@torch.compile(fullgraph=True, dynamic=False)
def update(weight, state):
    weight.sub_(state.float() * 0.1 + 1)
model = nn.Linear(64, 64, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = Halves(torch.zeros(32, 64, device="cuda"), torch.zeros(32, 64, device="cuda"))
print(state.device)
for step in range(3):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    with torch.no_grad():
        update(model.weight.detach(), state)
"""


@pytest.mark.slow
def test_compiled_functions_make_modules_and_look_for_fakes(tmp_path: Path) -> None:
    """Neither breaks the graph; products in bfloat16 have that type's rate, and allocations take no time."""
    ended = record_script(tmp_path, _MODULES, *_CARD)
    assert "2 graphs compiled as in a real run" in ended.stderr
    assert "ran eagerly" not in ended.stderr
    ops, speed = ended.step.ops, ended.trace.manifest.machine.speed
    products = ops.take(ops.name == "aten.addmm.out")
    np.testing.assert_allclose(products.duration_us, products.flops / speed.bf16_flops_per_us, rtol=0.01)
    assert (products.written_bytes == 1024 * 1024 * 2).all()
    assert (products.read_bytes == (2 * 1024 * 1024 + 1024) * 2).all()  # not what the buffer held before
    assert not ops.duration_us[ops.name == "aten.empty_strided.default"].any()


@pytest.mark.slow
def test_tensors_that_wrap_others_are_traced(tmp_path: Path) -> None:
    """As the states of quantized optimizers, whose update is compiled as a whole."""
    ended = record_script(tmp_path, _WRAPPED, *_CARD)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == "cuda:0"
    assert "1 graph compiled as in a real run" in ended.stderr
    assert "ran eagerly" not in ended.stderr
