"""Jobs that train tensors, without a model or an optimizer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memprof.recorder.recorder import Recorder
from memprof.recorder.steps.window import Window
from memprof.trace.schema import Steps
from memprof.trace.store import Trace
from tests.recorder.conftest import assert_same

_BYTES = 64 * 64 * 4


def recorded(folder: Path, job: Callable[[], Any], window: Window) -> Trace:
    """Runs a job twice, unrecorded and as `memprof record` does, which must return the same; returns the trace."""
    expected = job()
    gc.collect()  # optimizers of jobs before must not be waited for
    spool = folder / "run.memprof.spool"
    recorder = Recorder(spool / "process-1", window)
    recorder.install()
    try:
        found = job()
    finally:
        recorder.finish("the job ended")
    assert not recorder.failure
    assert_same(found, expected)
    (spool / "launch.json").write_text("{}")
    trace = Trace.open(spool)
    for number in trace.recorded_steps:
        trace.step(number).check()
    return trace


def by_backward(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """An update in place by the gradient that backward leaves."""
    loss = (x @ weight).square().mean()
    loss.backward()
    with torch.no_grad():
        weight -= 0.1 * weight.grad
    weight.grad = None
    return loss.detach()


def by_grad(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """An update in place by a gradient that is returned."""
    loss = (x @ weight).square().mean()
    (gradient,) = torch.autograd.grad(loss, weight)
    with torch.no_grad():
        weight.sub_(gradient, alpha=0.1)
    return loss.detach()


def by_second_order(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Two inner updates whose gradients are differentiated again."""
    fast = weight
    for _ in range(2):
        (gradient,) = torch.autograd.grad((x @ fast).square().mean(), fast, create_graph=True)
        fast = fast - 0.1 * gradient
    return by_backward(weight, x @ fast)


def by_transform(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of a function, whose own gradient in it is part of it."""

    def inner(values: torch.Tensor) -> torch.Tensor:
        return (x @ values).square().mean()

    slopes = torch.func.grad(lambda values: inner(values - 0.1 * torch.func.grad(inner)(values)))(weight.detach())
    with torch.no_grad():
        weight -= 0.1 * slopes
    return weight.detach().sum()


@pytest.mark.parametrize("update", [by_backward, by_grad, by_second_order, by_transform])
def test_each_outer_backward_ends_a_step(
    tmp_path: Path, update: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Of 8 updates, those of steps 2 to 4 are recorded; losses are the same to the bit (`recorded`)."""

    def job() -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight = torch.randn(64, 64, requires_grad=True)
        return [update(weight, torch.randn(64, 64)) for _ in range(8)]

    trace = recorded(tmp_path, job, Window(skip=2, steps=3))
    assert list(trace.recorded_steps) == [2, 3, 4]
    assert any("each backward ends a step" in note for note in trace.manifest.notes)
    for number in trace.recorded_steps:
        step = trace.step(number)
        names = [str(name) for name in step.ops.name]
        assert names.count("aten.randn.default") == 1, "one batch is drawn in each step"
        assert {"forward", "backward"} <= set(step.ops.phase.tolist())


def test_the_tensors_that_are_trained_are_its_parameters(tmp_path: Path) -> None:
    """One of 16 KiB, with its gradient of the same size."""

    def job() -> torch.Tensor:
        torch.manual_seed(0)
        weight = torch.randn(64, 64, requires_grad=True)
        for _ in range(5):
            by_backward(weight, torch.randn(64, 64))
        return weight.detach()

    storages = recorded(tmp_path, job, Window(skip=2, steps=1)).step(2).storages
    size = {kind: storages.requested_bytes[storages.category == kind] for kind in ("parameter", "gradient")}
    assert size["parameter"].tolist() == [_BYTES]
    assert set(size["gradient"].tolist()) == {_BYTES}


def test_a_model_that_comes_later_begins_the_window_anew(tmp_path: Path) -> None:
    """Two backwards of tensors and a check of gradients come before: the steps recorded are the model's updates."""

    def job() -> list[float]:
        torch.manual_seed(0)
        weight = torch.randn(64, 64, requires_grad=True)
        for _ in range(2):
            by_backward(weight, torch.randn(64, 64))
        torch.autograd.gradcheck(torch.sin, torch.ones(4, dtype=torch.double, requires_grad=True))
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(5):
            loss = model(torch.randn(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    trace = recorded(tmp_path, job, Window(skip=1, steps=2))
    steps = trace.table(Steps)
    updates = dict(zip(steps.step.tolist(), steps.optimizer_updates.tolist(), strict=True))
    assert [updates[number] for number in trace.recorded_steps[-2:]] == [1, 1]
