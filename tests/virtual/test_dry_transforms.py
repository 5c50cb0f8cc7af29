"""Transforms of torch.func in dry runs, whose tensors have no storage of their own, and gradients of gradients."""

from __future__ import annotations

from pathlib import Path

from tests.recorder.recorded import Ended, record_both, record_script

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
#: Of each number by which a real run multiplies, as a tensor that it keeps for a backward of backward.
_NUMBER_BYTES = 8


def test_gradients_of_tasks_are_recorded(tmp_path: Path) -> None:
    """Recording begins inside of the transforms, where the model is called first."""
    real, dry = record_both(tmp_path, _META_LEARNING)
    parameters, inner_steps = 4, 2
    assert 0 <= real.peak - dry.peak <= _NUMBER_BYTES * parameters * inner_steps


_SECOND_DERIVATIVES = """
import torch
from torch import nn

torch.manual_seed(0)
first, second, last = nn.Linear(2, 256), nn.Linear(256, 256), nn.Linear(256, 1)
optimizer = torch.optim.Adam([*first.parameters(), *second.parameters(), *last.parameters()])

for _ in range(8):
    optimizer.zero_grad()
    places = torch.rand(1, 512, 2, requires_grad=True)
    out = last(torch.sin(30 * second(torch.sin(30 * first(places)))))
    (slope,) = torch.autograd.grad(out.sum(), places, create_graph=True)
    curved = [torch.autograd.grad(slope[..., i].sum(), places, create_graph=True)[0][..., i] for i in range(2)]
    (curved[0] + curved[1]).pow(2).mean().backward()
    optimizer.step()
"""


def test_gradients_with_a_graph_are_summed_out_of_place(tmp_path: Path) -> None:
    """autograd adds up gradients in place, but not where their own gradients follow."""
    real = record_script(tmp_path, _SECOND_DERIVATIVES, name="real.memprof")  # with a step without the recorder
    dry = record_script(tmp_path, _SECOND_DERIVATIVES, "--dry-run", name="dry.memprof")
    assert 0 <= real.peak - dry.peak <= 2 * _NUMBER_BYTES
    assert _count_large(real) == _count_large(dry)


def _count_large(ended: Ended) -> int:
    """Returns how many storages of the hidden layers' size a step makes."""
    storages = ended.step.storages
    return int(((storages.requested_bytes >= 4 * 512 * 256) & (storages.created_op_id >= 0)).sum())
