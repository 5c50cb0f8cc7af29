"""Activations of a subclass of tensors without operators of its own, such as MONAI's MetaTensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch.test_plan_record import memprof

_JOB = """
import torch
from torch import nn

class Tagged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(result, cls):
            result.tag = next((each.tag for each in args if hasattr(each, "tag")), None)
        return result

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x
    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        assert isinstance(x, Tagged) and x.tag == "scan", type(x)
        return 2 * gradient

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 64), nn.PReLU(), nn.Linear(64, 64), nn.PReLU())
        self.last = nn.Linear(64, 1)
    def forward(self, x):
        return self.last(self.first(Doubled.apply(x)))

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    x = torch.randn(512, 64).as_subclass(Tagged)
    x.tag = "scan"
    loss = model(x).as_subclass(torch.Tensor).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("modules", ["first", "."])
def test_activations_of_a_subclass_are_moved(modules: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stayed, which was 1 MiB for each PReLU of MONAI's U-Net; backward gets them in their type, with fields."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(_JOB)
    plain = memprof("record", "-q", "-o", "run.memprof", "train.py").stdout
    predicted = memprof("predict", "run.memprof", "--swap", f"{modules}:disk", "--write", "plan.toml")
    assert predicted.returncode == 0, predicted.stderr
    ended = memprof("record", "-q", "-o", "head.memprof", "--plan", "plan.toml", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == plain
    found = json.loads(memprof("verify", "plan.toml", "head.memprof", "--json").stdout)
    assert found["measured"]["peak_allocated_bytes"] == found["predicted"]["peak_allocated_bytes"]


_NESTED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
    def forward(self, x):
        rows = torch.nested.as_nested_tensor([x, x[:200]])
        return torch.nested.to_padded_tensor(self.last(self.first(rows).relu()), 0.0)

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    loss = model(torch.randn(512, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}\\n", end="", flush=True)
"""


def test_nested_tensors_are_left_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch's strided layout have no sizes, so that swap ended the job."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(_NESTED)
    plain = memprof("record", "-q", "-o", "run.memprof", "train.py").stdout
    predicted = memprof("predict", "run.memprof", "--swap", ".:disk", "--write", "plan.toml")
    assert predicted.returncode == 0, predicted.stderr
    ended = memprof("record", "-q", "-o", "head.memprof", "--plan", "plan.toml", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == plain


def test_a_dry_run_moves_activations_of_a_subclass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors have a class that is the job's and a fake tensor's: they stayed, and its peak was higher."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(_JOB)
    memprof("record", "-q", "--dry-run", "-o", "run.memprof", "train.py")
    predicted = memprof("predict", "run.memprof", "--swap", "first:disk", "--write", "plan.toml")
    assert predicted.returncode == 0, predicted.stderr
    ended = memprof("record", "-q", "--dry-run", "-o", "head.memprof", "--plan", "plan.toml", "train.py")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(memprof("verify", "plan.toml", "head.memprof", "--json").stdout)
    assert found["measured"]["peak_allocated_bytes"] == found["predicted"]["peak_allocated_bytes"]
