"""Jobs whose backward runs through gradients (``create_graph=True``): predictions of precision, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from memprof.errors import PolicyError
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.plan.interval import interval_of
from memprof.policies.precision.policy import Precision
from tests.policies.faces import compare
from tests.policies.small_jobs import Small, peak, record

BF16, PURE = Precision("bf16"), Precision("bf16", "bf16")


def adapting() -> Small:
    """Meta-learning (MAML): the loss after two updates of the weights, differentiated through these updates."""
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        x, y = torch.randn(64, 32), torch.randn(64, 8)
        weights = dict(model.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(functional_call(model, weights, (x,)), y)
            slopes = torch.autograd.grad(loss, tuple(weights.values()), create_graph=True)
            pairs = zip(weights.items(), slopes, strict=True)
            weights = {name: value - 0.1 * slope for (name, value), slope in pairs}
        optimizer.zero_grad()
        F.mse_loss(functional_call(model, weights, (x,)), y).backward()
        optimizer.step()

    return Small([model], step, [optimizer])


def penalized() -> Small:
    """A penalty on the slope of a model's output by its input."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        x = torch.randn(128, 64, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        optimizer.zero_grad()
        (slope.norm(dim=1) - 1).pow(2).mean().backward()
        optimizer.step()

    return Small([model], step, [optimizer])


def watched() -> Small:
    """The same, and a test loss whose graph a variable holds for a step, with autocast's copies of the weights."""
    small = penalized()
    model = small.models[0]
    held: list[torch.Tensor] = []

    def step() -> None:
        small.step()
        x = torch.randn(8, 64, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        held[:] = [slope.pow(2).mean()]

    return Small([model], step, small.optimizers)


def test_accumulate_is_refused_under_another_precision_too(tmp_path):
    """Weights that are cast before they are read are parameters still: the run would refuse the plan."""
    with pytest.raises(PolicyError, match="gradients of the parameters"):
        Accumulate(2).transform(BF16.transform(record(adapting, tmp_path)))
