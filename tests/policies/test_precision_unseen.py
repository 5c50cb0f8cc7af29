"""Cases of the precision policy found on third-party jobs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from memprof.errors import PolicyError
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.precision.policy import Precision
from memprof.policies.runtime.job import Job

FP16, PURE = Precision("fp16"), Precision("bf16", "bf16")


def test_gradients_may_be_computed_by_keyword():
    """torch.autograd's functions take what they differentiate by keyword, too, under fp16."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    FP16.apply(Job(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
    x = torch.randn(3, 4, requires_grad=True)
    (by_keyword,) = torch.autograd.grad(outputs=model(x).sum(), inputs=x)
    (by_place,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(by_keyword, by_place)
    torch.autograd.backward(tensors=model(x).sum())
    assert model[0].weight.grad is not None
    with pytest.raises(PolicyError, match="create_graph=True"):
        torch.autograd.grad(outputs=model(x).sum(), inputs=x, create_graph=True)


class Batch:
    """What some libraries call their models with: an object that holds tensors."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class OfBatches(nn.Module):
    """Takes what it computes with out of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.second(self.first(batch.x).relu().float())


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_tensors_out_of_objects_are_made_short(is_checkpointed):
    """A part of a model with short weights takes float32 that the model hands it, also where it runs again."""
    model = OfBatches()
    job = Job(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    PURE.apply(job)
    if is_checkpointed:
        Checkpoint(("first",)).apply(job)
    loss = model(Batch(torch.randn(4, 8))).sum()
    loss.backward()
    assert loss.dtype == torch.float32
    assert model.first.weight.grad.dtype == torch.bfloat16


def test_types_that_do_not_mix_are_said_in_a_sentence():
    """An operator that takes one type, given a tensor the model created in float32, ends the job with a message."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) @ torch.zeros(8, 3)

    model = Product()
    PURE.apply(Job(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
    with pytest.raises(PolicyError, match=r"Product does not run in bfloat16: .*same dtype.*write bf16"):
        model(torch.randn(4, 8))


@pytest.mark.parametrize("policy", [Precision("bf16"), PURE], ids=["autocast", "pure"])
def test_what_a_forward_gives_to_numpy_is_float32(policy):
    """NumPy has no bfloat16; after the plan is undone, torch's own method is back, or that under the plan before."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
            y = self.linear(x)
            return y, np.asarray(y.detach())

    before = vars(torch.Tensor).get("numpy")
    model = Weighted()
    job = Job(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    policy.apply(job)
    assert torch.ones(2, dtype=torch.bfloat16).numpy().dtype == np.float32
    outputs, seen = model(torch.randn(2, 4))
    assert seen.dtype == np.float32
    assert torch.equal(torch.from_numpy(seen), outputs.detach())
    job.undo()
    assert vars(torch.Tensor).get("numpy") in (None, before)  # plans of earlier tests may end meanwhile
