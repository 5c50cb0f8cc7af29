"""What runs inside a transform of torch.func is left alone by policies, and predicted to be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from memprof.errors import PolicyError
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.compress.policy import Compress
from memprof.policies.evict.outline import units_of
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.remat.policy import Remat
from memprof.policies.rewrite.stack_marks import is_in_transform
from memprof.policies.runtime.model_names import trained_roots
from memprof.policies.swap.policy import Swap
from memprof.trace.schema import NONE
from tests.policies.small_jobs import Small, peak, record


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


def per_sample(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One update from the mean of clipped gradients of each sample."""

    def loss_of(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), torch.zeros(1, dtype=torch.int64))

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    each = vmap(grad(loss_of), in_dims=(None, 0))(parameters, torch.randn(32, 64))
    for name, parameter in model.named_parameters():
        parameter.grad = each[name].clamp(-1, 1).mean(0)
    optimizer.step()


def private() -> Small:
    """Trains by gradients of each sample."""
    model = layers()
    optimizer = torch.optim.Adam(model.parameters())
    return Small([model], lambda: per_sample(model, optimizer), [optimizer])


class Guided(nn.Module):
    """Layers that train as usual, and slopes of others, which a transform computes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.energy, self.after = layers(), layers(), layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.guide(self.before(x)))

    def guide(self, x: torch.Tensor) -> torch.Tensor:
        slopes = vmap(grad(lambda row: self.energy(row).square().sum()))(x.detach())
        return x + slopes.detach()


def guided() -> Small:
    """Trains a model that runs partly inside a transform."""
    model = Guided()
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(512, 64)).square().mean().backward()
        optimizer.step()

    return Small([model], step, [optimizer])


def test_operators_of_transforms_are_found(tmp_path: Path) -> None:
    """Forward and backward inside vmap(grad(...)) are marked; calls through functional_call alone are not."""
    step = record(guided, tmp_path)
    inside = is_in_transform(step)
    is_forward = (step.ops.module_id != NONE) & (step.ops.phase == "forward")
    parts = [
        {str(name).split(".")[0] for name in step.modules.name[step.ops.module_id[is_forward & rows]]} - {""}
        for rows in (inside, ~inside)
    ]
    assert parts == [{"energy"}, {"before", "after"}]
    assert not is_in_transform(record(by_functional_call, tmp_path)).any()


def by_functional_call() -> Small:
    """Trains weights of its own through functional_call."""
    model = layers()
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.Adam(weights.values())

    def step() -> None:
        optimizer.zero_grad()
        functional_call(model, weights, (torch.randn(32, 64),)).square().mean().backward()
        optimizer.step()

    return Small([model], step, [optimizer])


@pytest.mark.parametrize(
    "policy",
    [Swap(to="disk", modules=("*",), minimum_bytes=0), Compress(modules=("*",), minimum_bytes=0), Checkpoint(("*.*",))],
    ids=lambda policy: policy.name,
)
def test_prediction_is_the_measured_peak(policy: Policy, tmp_path: Path) -> None:
    """Around a transform policies change what they did before, and inside it nothing."""
    predicted = policy.transform(record(guided, tmp_path))
    assert peak(predicted) == peak(record(guided, tmp_path, policy))


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (Swap(to="disk", minimum_bytes=0), "run inside a transform of torch.func"),
        (Compress(minimum_bytes=0), "run inside a transform of torch.func"),
        (Checkpoint(("*",)), "the model runs inside a transform of torch.func"),
        (ChunkedLoss(minimum_bytes=0), "no cross_entropy trains on"),
        (Swap(to="disk", what="parameters", minimum_bytes=0), "used outside of torch.func"),
    ],
)
def test_policy_without_effect_is_refused(policy: Policy, sentence: str, tmp_path: Path) -> None:
    """Where everything that a policy would change runs inside a transform, it says so."""
    with pytest.raises(PolicyError, match=sentence):
        policy.transform(record(private, tmp_path))


def test_remat_drops_nothing_saved_inside(tmp_path: Path) -> None:
    """The runtime does not see what autograd saves inside a transform."""
    step = record(private, tmp_path)
    assert len(step.saved)
    assert not units_of(step).may_go.any()
    with pytest.raises(PolicyError, match="remat cannot stay within"):
        Remat(budget=str(peak(step) * 9 // 10)).transform(step)


@pytest.mark.parametrize("is_functional", [True, False])
def test_a_model_whose_parameters_are_passed_in_is_trained(tmp_path: Path, *, is_functional: bool) -> None:
    """Its own are neither used nor have gradients; a frozen model, which is called with its own, is not trained."""

    def job() -> Small:
        model = layers().requires_grad_(False)
        given = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}

        def train() -> None:
            x = torch.randn(8, 64)
            if is_functional:
                grad(lambda values: functional_call(model, values, (x,)).sum())(given)
            else:
                torch.autograd.grad(model(x.requires_grad_()).sum(), x)

        return Small([model], train, [])

    assert bool(trained_roots(record(job, tmp_path)).any()) is is_functional
