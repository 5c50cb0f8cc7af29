"""Variables of a model's code keep tensors that swap moves: recordings do not show it, and the interval counts it."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

import memprof
from memprof.policies.plan.interval import Interval, interval_of
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE
from memprof.trace.step import Step
from memprof.trace.store import Trace


class Block(nn.Module):
    """Holds what it makes until it returns."""

    def __init__(self) -> None:
        super().__init__()
        widths = (256, 248, 240, 232, 224, 256)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        one, two, three, four, five = self.layers
        first = torch.tanh(one(batch))
        second = torch.tanh(two(first))
        third = torch.tanh(three(second))
        fourth = torch.tanh(four(third))
        return batch + five(fourth)


class Attention(nn.Module):
    """Returns its weights, before softmax and after it, beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(256, 768)

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        query, key, value = self.project(batch).chunk(3, dim=-1)
        similarities = query @ key.mT * 0.1
        weights = similarities.softmax(-1)
        return weights @ value, (similarities, weights)


class Collecting(nn.Module):
    """Keeps all that its layers return until it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        returned = []
        for layer in self.layers:
            out, others = layer(batch)
            returned.append(others)
            batch = batch + out
        return batch


class Cell(nn.Module):
    """Keeps its state, which each call replaces."""

    def forward(self, batch: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.state = 0.9 * state + batch
        return torch.tanh(self.state - 1.0), self.state


class Recurrent(nn.Module):
    """Calls a cell at each time step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cell = nn.Linear(256, 256), Cell()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(batch)
        outputs = []
        for _ in range(12):
            output, state = self.cell(self.layer(batch), state)
            outputs.append(output.mean())
        return torch.stack(outputs)


def blocks() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(2)))


def record(path: Path, policy: Swap | None, make: Callable[[], nn.Module] = blocks) -> Step:
    torch.manual_seed(0)
    gc.collect()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job(model, [optimizer])
    if policy is not None:
        policy.apply(job)
    with memprof.record(path, skip=1, steps=2):
        for _ in range(4):
            model(torch.randn(2048, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    job.undo()
    return Trace.open(path).steady_step()


def peak(step: Step) -> int:
    return int(live_bytes(step).during.max())


def compare(folder: Path, policy: Swap, make: Callable[[], nn.Module]) -> tuple[int, int, Interval, int]:
    """Returns the plain peak, the predicted one with its bounds, and the measured one."""
    step = record(folder / "plain.memprof", None, make)
    predicted = policy.transform(step)
    measured = peak(record(folder / "swapped.memprof", policy, make))
    return peak(step), peak(predicted), interval_of((policy,), (step,), (predicted,)), measured


def test_what_variables_hold_is_inside_the_interval(tmp_path: Path) -> None:
    """To the byte where the source was read; else the measured peak is above the predicted one, within the interval."""
    policy = Swap(("*",), to="disk")
    step = record(tmp_path / "plain.memprof", None)
    measured = peak(record(tmp_path / "swapped.memprof", policy))
    assert peak(policy.transform(step)) == measured
    unread = replace(step, storages=step.storages.replace(held_op_id=np.full(len(step.storages), NONE)))
    predicted = policy.transform(unread)
    bounds = interval_of((policy,), (unread,), (predicted,))
    assert peak(predicted) < measured <= bounds.most_bytes
    assert bounds.most_bytes < 1.02 * measured


def test_what_a_layer_returns_beside_its_output_is_inside_the_interval(tmp_path: Path) -> None:
    """What it returns unsaved shows that as much of what it saved may be held as long."""
    _, predicted, bounds, measured = compare(tmp_path, Swap(("layers.*",), to="disk"), Collecting)
    assert predicted < 0.9 * measured
    assert measured <= bounds.most_bytes < 1.05 * measured


def test_a_state_that_each_call_replaces_is_held_once(tmp_path: Path) -> None:
    """That of the last call lives on after the forward: those of the calls before were freed, and may be moved."""
    plain, _, bounds, measured = compare(tmp_path, Swap(("cell",), to="disk"), Recurrent)
    assert bounds.least_bytes <= measured <= bounds.most_bytes < 0.7 * plain
