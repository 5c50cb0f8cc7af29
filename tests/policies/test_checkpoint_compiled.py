"""Regions of `checkpoint` in models that torch.compile traces."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs

from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.runtime.job import Job

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles


class _Block(nn.Module):
    """A layer with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        """Takes a keyword, as layers of libraries do."""
        return torch.relu(self.norm(self.linear(x))) * scale


class _Net(nn.Module):
    """Two such layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Calls them in turn."""
        for layer in self.layers:
            x = layer(x, scale=2.0)
        return x


def _run(net: _Net, *, has_grad: bool = True) -> tuple[torch.Tensor, int]:
    """Runs a compiled model, and backward; returns its output, and how many regions were traced."""
    torch._dynamo.reset()
    backend = AotEagerAndRecordGraphs()
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    with contextlib.nullcontext() if has_grad else torch.no_grad():
        out = torch.compile(net, backend=backend)(x)
    if has_grad:
        out.square().sum().backward()
    targets = [str(node.target) for graph in backend.graphs for node in graph.graph.nodes]
    return out.detach(), targets.count("tag_activation_checkpoint")


@pytest.mark.parametrize("keep", [(), ("matmul",)], ids=["all", "keeps products"])
def test_a_compiled_model_trains_as_without_regions(keep: tuple[str, ...]) -> None:
    """Running statistics, which the forward updates, are updated once; what is kept is kept by the compiler."""
    plain, net = _Net(), _Net()
    expected, _ = _run(plain)
    job = Job(net)
    Checkpoint(("layers.*",), keep=keep).apply(job)
    out, regions = _run(net)
    job.undo()
    assert regions == 2
    torch.testing.assert_close(out, expected)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value)
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("has_grad", [True, False], ids=["evaluation mode", "no gradients"])
def test_evaluation_has_no_regions(*, has_grad: bool) -> None:
    """As in an eager job: nothing is recomputed in evaluation mode, and there is no backward without gradients."""
    net = _Net()
    job = Job(net)
    Checkpoint(("layers.*",)).apply(job)
    net.train(not has_grad)
    assert _run(net, has_grad=has_grad)[1] == 0
    job.undo()
