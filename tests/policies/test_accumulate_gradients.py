"""What a loop does to its gradients between backward and update, and to its learning rate."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memprof
from memprof.errors import PolicyError
from memprof.policies.accumulate.candidates import candidates
from memprof.policies.accumulate.policy import BY_HAND, CHANGED, Accumulate
from memprof.policies.runtime.job import Job
from memprof.trace.store import Trace

Between = Callable[[nn.Module, torch.Tensor], None]


def sets_them(model: nn.Module, batch: torch.Tensor) -> None:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(batch).square().mean(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient / 2


def scales_them(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


@pytest.mark.parametrize(("train", "sentence"), [(sets_them, BY_HAND), (scales_them, CHANGED)])
def test_gradients_that_the_loop_makes_or_changes_are_refused(train: Between, sentence: str) -> None:
    """They would be made, or changed, once for each micro-batch."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    job = Job(model, [optimizer])
    Accumulate(2).apply(job)
    (batch,) = next(iter(DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=16)))
    train(model, batch)
    with pytest.raises(PolicyError) as refused:
        optimizer.step()
    job.undo()
    assert str(refused.value) == sentence


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_loop_that_sets_the_learning_rate_is_not_offered_micro_batches(by_hand: bool, tmp_path: Path) -> None:
    """Its count of batches would be one of micro-batches; a scheduler of torch is held back until the update."""
    gc.collect()
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = None if by_hand else torch.optim.lr_scheduler.LinearLR(optimizer)
    with memprof.record(tmp_path / "run.memprof", skip=1, steps=2):
        for number, (batch,) in enumerate(DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=16)):
            if by_hand:
                optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    found = candidates(Trace.open(tmp_path / "run.memprof").steady_step(), world_size=1)
    assert ["learning rate" in reason for reason in found.unsuitable.values()] == [True] * by_hand
    assert bool(found.whole_step) is not by_hand
