"""Nested module calls between stretches take a short path, with the counts and the place of any other call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import memprof
from memprof.recorder.light.events import Budget
from memprof.recorder.light.position import Position
from memprof.trace.schema import ModulePeaks, StepPeaks
from memprof.trace.store import Trace

_STEPS = 40


class _Failing(torch.nn.Module):
    """Fails when it is told to."""

    def __init__(self) -> None:
        """Works at first."""
        super().__init__()
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what it is given."""
        if self.fails:
            raise ValueError("as told")
        return x


def _model() -> torch.nn.Sequential:
    layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU()) for _ in range(3)]
    return torch.nn.Sequential(torch.nn.Linear(16, 32), *layers, _Failing(), torch.nn.Linear(32, 1))


def _follow(path: Path, *, fails: bool = False) -> Trace:
    torch.manual_seed(0)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memprof.record(path, light=True):
        for step in range(_STEPS):
            batch = torch.randn(512 if step == 30 else 64, 16)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            del batch
        if fails:
            model[4].fails = True
            model(torch.randn(64, 16))
    return Trace.open(path)


def _steps(trace: Trace) -> list[tuple[int, int, int, int]]:
    table = trace.table(StepPeaks)
    low = int(table.allocated_bytes.min())
    return [
        (step, phase, module, count - low)
        for step, phase, module, count in zip(
            table.step.tolist(),
            table.phase.tolist(),
            table.module_id.tolist(),
            table.allocated_bytes.tolist(),
            strict=True,
        )
    ]


def _modules(trace: Trace) -> set[tuple[int, int, int]]:
    table = trace.table(ModulePeaks)
    return set(zip(table.step.tolist(), table.phase.tolist(), table.module_id.tolist(), strict=True))


def test_the_short_path_counts_what_the_long_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks of steps, their modules, and the steps in which modules peaked are the same on both."""
    monkeypatch.setattr(Budget, "may_listen", lambda _: False)
    taken = []
    opened = Position.open_nested
    monkeypatch.setattr(Position, "open_nested", lambda at, module: taken.append(opened(at, module)) or taken[-1])
    _follow(tmp_path / "warm.memprof")
    short = _follow(tmp_path / "short.memprof")
    assert sum(call is not None for call in taken) > _STEPS * 10
    monkeypatch.setattr(Position, "open_nested", lambda *_: None)
    long = _follow(tmp_path / "long.memprof")
    assert _steps(short)[3:] == _steps(long)[3:]  # before, Python still frees what was there
    assert {one for one in _modules(short) if one[0] == 30} == {one for one in _modules(long) if one[0] == 30}
    highest = max(_steps(short), key=lambda one: one[3])
    assert highest[0] == 30


class _Teaching(torch.nn.Module):
    """Calls a module without gradients in forward, and takes most memory after that."""

    def __init__(self) -> None:
        """Makes both modules."""
        super().__init__()
        self.student, self.teacher = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a loss."""
        x = self.student(self.student(self.student(x)))
        with torch.no_grad():
            target = self.teacher(x)
        return (torch.ones(100_000) * (x * target).sum()).sum()


def test_forward_goes_on_after_a_call_without_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model takes after it has called a teacher belongs to forward."""
    monkeypatch.setattr(Budget, "may_listen", lambda _: False)
    model = torch.nn.Sequential(_Teaching())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memprof.record(tmp_path / "run.memprof", light=True):
        for _ in range(_STEPS):
            model(torch.ones(64, 16)).backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = Trace.open(tmp_path / "run.memprof")
    assert set(trace.table(StepPeaks).phase) == {"forward"}
    table = trace.table(ModulePeaks)
    above = table.allocated_bytes - table.allocated_bytes.min()  # other tests may have left memory in this process
    # Backward's own product is as large; only the listener sees it, where one is built.
    assert set(table.phase[above > 300_000]) - {"backward"} == {"forward"}


def test_an_error_on_the_short_path_keeps_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording ends in the module that failed, though its call was opened on the short path."""
    monkeypatch.setattr(Budget, "may_listen", lambda _: False)
    with pytest.raises(ValueError, match="as told"):
        _follow(tmp_path / "run.memprof", fails=True)
    assert Trace.open(tmp_path / "run.memprof").manifest.capture.ends_at == f"step {_STEPS}, forward of 4"
