"""Jobs that run something between two training steps, and the recorded phases."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import nn

from memprof.trace.step import Step

Between = Callable[[nn.Module, torch.optim.Optimizer | None], Any]
ROWS, LABELS = torch.linspace(-1, 1, 16 * 8).reshape(16, 8), torch.arange(16) % 4


def training(between: Between, *, loss: Callable[[nn.Module], torch.Tensor] | None = None) -> Callable[[], list[Any]]:
    """A job that trains for four steps, and runs something between two of them."""

    def train() -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        found: list[Any] = []
        for _ in range(4):
            error = loss(model) if loss is not None else nn.functional.cross_entropy(model(ROWS), LABELS)
            error.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [error.detach(), between(model, optimizer)]
        return found

    return train


def runs(step: Step, *names: str) -> list[str]:
    """The phases of a step, in order; with names, only of these operators."""
    chosen = (
        step.ops.phase
        if not names
        else step.ops.phase[[name.split(".")[1:2] in [[each] for each in names] for name in step.ops.name]]
    )
    return [phase for phase, _ in groupby(chosen)]


def evaluate(model: nn.Module, *_: Any) -> list[torch.Tensor]:
    model.eval()
    correct = []
    with torch.no_grad():
        for _batch in range(2):
            rows = torch.full((16, 8), 0.25)
            correct.append((model(rows).argmax(1) == LABELS).float().mean())
    model.train()
    torch.zeros(3)
    return correct


def save_and_load(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    assert optimizer is not None
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    torch.ones(5)
    file.seek(0)
    found = torch.load(file)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
