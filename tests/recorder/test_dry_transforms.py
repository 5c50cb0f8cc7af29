"""Transforms of torch.func in dry runs: their tensors wrap others, and have no storage of their own."""

from __future__ import annotations

from pathlib import Path

from tests.recorder.recorded import record_both

_META_LEARNING = """
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(net.parameters())
support, targets = torch.randn(3, 10, 8), torch.randint(0, 4, (3, 10))
query, answers = torch.randn(3, 20, 8), torch.randint(0, 4, (3, 20))

def loss_of(weights, rows, labels):
    return nn.functional.cross_entropy(functional_call(net, weights, (rows,)), labels)

def of_task(rows, labels, other_rows, other_labels):
    weights = dict(net.named_parameters())
    for _ in range(2):
        slopes = grad(loss_of)(weights, rows, labels)
        weights = {name: weight - 0.1 * slopes[name] for name, weight in weights.items()}
    return loss_of(weights, other_rows, other_labels)

for _ in range(4):
    optimizer.zero_grad()
    loss = vmap(of_task)(support, targets, query, answers).sum()
    loss.backward()
    optimizer.step()
"""
#: Of each number by which a real run multiplies inside of a transform, as a tensor that it keeps for backward.
_NUMBER_BYTES = 8


def test_gradients_of_tasks_are_recorded(tmp_path: Path) -> None:
    """Recording begins inside of the transforms, where the model is called first."""
    real, dry = record_both(tmp_path, _META_LEARNING)
    parameters, inner_steps = 4, 2
    assert 0 <= real.peak - dry.peak <= _NUMBER_BYTES * parameters * inner_steps
