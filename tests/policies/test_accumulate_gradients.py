"""Evaluation between updates, gradients and learning rates in a loop that accumulates."""

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
from memprof.policies.accumulate.batch import find_batch, likely_batch
from memprof.policies.accumulate.candidates import candidates
from memprof.policies.accumulate.policy import BY_HAND, CHANGED, Accumulate
from memprof.policies.runtime.job import Job
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
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


TRAINED, EVALUATED = 16, 32


class Noise(nn.Module):
    """Scales images by an entry of a table that is not a buffer, as in the schedulers of diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [torch.rand(1000)]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images * self.tables[0][500]


def record(path, policy: Accumulate | None = None) -> Step:
    """Records a step of a job that evaluates after each update, on batches twice as large."""
    torch.manual_seed(0)
    gc.collect()
    layers = [
        Noise(),
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(4 * EVALUATED, 3, 24, 24), torch.randint(0, 4, (4 * EVALUATED,)))
    job = Job(model, [optimizer])
    if policy:
        policy.apply(job)
    rounds = 0
    with memprof.record(path, skip=2, steps=2) as recorder:
        for images, labels in DataLoader(data, TRAINED):
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            rounds += 1
            if policy and rounds % policy.micro_batches:
                continue
            model.eval()
            with torch.no_grad():
                for seen, _ in DataLoader(data, EVALUATED):
                    model(seen).argmax(1)
                    break
            model.train()
            recorder.step()
    job.undo()
    return Trace.open(path).steady_step()


def highest(step: Step, phase: str) -> int:
    """Returns the peak of a phase."""
    return int(live_bytes(step).during[step.ops.phase == phase].max())


def test_evaluation_stays_whole(tmp_path):
    """Forward and backward shrink with the parts of a batch; an evaluation on batches of its own does not."""
    plain, policy = record(tmp_path / "plain.memprof"), Accumulate(2)
    predicted, measured = policy.transform(plain), record(tmp_path / "planned.memprof", policy)
    ran = (plain.ops.phase == "evaluation").sum()
    assert (predicted.ops.phase == "evaluation").sum() == ran > 0
    assert highest(predicted, "evaluation") == pytest.approx(highest(plain, "evaluation"), rel=0.01)
    assert highest(predicted, "backward") < 0.8 * highest(plain, "backward")
    for phase in ("forward", "backward", "evaluation"):
        assert highest(predicted, phase) == pytest.approx(highest(measured, phase), rel=0.03), phase


class Normalized(torch.utils.data.Dataset):
    """Images that a module normalizes one by one, as torchvision's transforms do."""

    def __init__(self) -> None:
        self.images = torch.rand(40, 3, 8, 8)
        self.transform = nn.Sequential(nn.InstanceNorm2d(3), nn.ReLU())

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.images[index]), index % 4


def test_transforms_of_single_samples_are_not_the_batch(tmp_path):
    """Where the loader transforms samples in the job's own process, the batch is not taken for their channels."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    optimizer = torch.optim.Adam(model.parameters())
    with memprof.record(tmp_path / "loaded.memprof", skip=2, steps=2) as recorder:
        for images, labels in DataLoader(Normalized(), 8):
            optimizer.zero_grad()
            scores = model(images)
            nn.functional.cross_entropy(scores, labels).backward()
            optimizer.step()
            recorder.step()
            (scores.argmax(1) == labels).float().mean().item()
    step = Trace.open(tmp_path / "loaded.memprof").steady_step()
    assert find_batch(step).size == likely_batch(step) == 8
