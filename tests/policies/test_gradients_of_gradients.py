"""Jobs whose backward runs through gradients (``create_graph=True``), which accumulate refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from memprof.errors import PolicyError
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.precision.policy import Precision
from tests.policies.small_jobs import Small, record


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


def test_accumulate_is_refused_under_another_precision_too(tmp_path):
    """Weights that are cast before they are read are parameters still: the run would refuse the plan."""
    with pytest.raises(PolicyError, match="gradients of the parameters"):
        Accumulate(2).transform(Precision("bf16").transform(record(adapting, tmp_path)))
