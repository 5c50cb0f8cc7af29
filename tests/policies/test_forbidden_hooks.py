"""A job may forbid saved-tensor hooks, or use torch.func, under policies that work with such hooks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from memprof.policies.base import Policy
from memprof.policies.remat.policy import Remat
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from memprof.recorder.profiler.native import AllocatorTable

POLICIES = {
    "remat": Remat(budget="1GiB"),
    "remat of what is named": Remat(recompute=("0:aten.addmm.default:0",)),
    "swap": Swap.from_flag("activations:disk"),
}


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    """The allocator counts all the while, as in a job that is started under a plan."""
    table = AllocatorTable()
    table.switch_on(is_late=True)
    yield
    table.switch_off()


class Transforms(nn.Module):
    """Uses what torch does not let saved-tensor hooks into, inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slopes = torch.func.vmap(torch.func.grad(lambda row: torch.sin(self.linear(row)).sum()))(x)
        with torch.autograd.graph.disable_saved_tensors_hooks("forbidden here"):
            hidden = torch.tanh(self.linear(x))
        return hidden * slopes.detach()


def train(policy: Policy | None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), Transforms(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job(model, [optimizer])
    if policy is not None:
        policy.apply(job)
    losses = []
    try:
        for _ in range(3):
            loss = model(torch.randn(32, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    finally:
        job.undo()
    return losses


@pytest.mark.parametrize("name", POLICIES)
def test_the_numbers_are_those_without_the_policy(name: str) -> None:
    """Transforms of torch.func and a block that forbids hooks run inside a forward, and the losses are equal."""
    assert train(POLICIES[name]) == train(None)


def test_hooks_of_the_jobs_own_are_refused_as_ever() -> None:
    """If the job disables hooks while its own are active, or enters some, torch raises its own error."""
    job = Job(model := nn.Linear(2, 2), [])
    POLICIES["remat"].apply(job)
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            model(torch.ones(1, 2))
            with (
                pytest.raises(RuntimeError, match="own words"),
                torch.autograd.graph.disable_saved_tensors_hooks("own words"),
            ):
                pass
        with torch.autograd.graph.disable_saved_tensors_hooks("own words"):
            with pytest.raises(RuntimeError, match="own words"):
                torch._C._autograd._push_saved_tensors_default_hooks(lambda x: x, lambda x: x)
            assert not torch._C._autograd._saved_tensors_hooks_is_enabled()
        assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    finally:
        job.undo()


def test_a_plan_begins_where_hooks_are_forbidden() -> None:
    """A model that is first called where hooks are forbidden gets its policy, which ends there as well."""
    with torch.autograd.graph.disable_saved_tensors_hooks("own words"):
        job = Job(model := nn.Linear(2, 2), [])
        POLICIES["remat"].apply(job)
        model(torch.ones(1, 2)).sum().backward()
        job.undo()
        assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() == "own words"
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
