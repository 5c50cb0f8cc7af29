"""Positions of a light recording: short paths between stretches, and marks of memory events."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import memprof
from memprof.recorder.light.events import Budget, Marks
from memprof.recorder.light.position import Position
from memprof.trace.files.spool import BACKWARD, FORWARD, OTHER
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


#: Two modules run in forward, then backward runs outside of modules.
FIRST, SECOND = 3, 4


@pytest.fixture
def marks() -> Marks:
    """The marks of a step; the first module makes nodes 10 to 11, the second 12 and more."""
    made = Marks()
    made.add(100, 10, FORWARD, FIRST)
    made.add(200, 12, FORWARD, SECOND)
    made.add(300, 15, OTHER, -1)
    return made


@pytest.mark.parametrize(
    ("moment_ns", "place"),
    [(100, (FORWARD, FIRST)), (199, (FORWARD, FIRST)), (200, (FORWARD, SECOND)), (350, (OTHER, -1))],
)
def test_an_event_belongs_to_the_position_at_its_time(marks: Marks, moment_ns: int, place: tuple[int, int]) -> None:
    """A position lasts until the next one."""
    assert marks.place_of(moment_ns, -1) == place


@pytest.mark.parametrize(("node", "module"), [(10, FIRST), (11, FIRST), (12, SECOND), (9, -1)])
def test_a_backward_node_belongs_to_the_module_that_made_it(marks: Marks, node: int, module: int) -> None:
    """By its sequence number; a node that is older than all positions belongs to none."""
    assert marks.place_of(310, node) == (BACKWARD, module)


def test_what_follows_a_node_belongs_to_it(marks: Marks) -> None:
    """Autograd itself allocates for the results of a node, up to the next position."""
    assert marks.place_of(310, 11) == (BACKWARD, FIRST)
    assert marks.place_of(320, -1) == (BACKWARD, FIRST)
    marks.add(330, 15, OTHER, -1)
    assert marks.place_of(340, -1) == (OTHER, -1)


def test_a_module_that_runs_inside_backward_keeps_its_events(marks: Marks) -> None:
    """A recomputed module is where its allocations are, whatever node is around it."""
    marks.add(330, 15, BACKWARD, SECOND)
    assert marks.place_of(340, 10) == (BACKWARD, SECOND)


def test_cleared_marks_attribute_nothing(marks: Marks) -> None:
    """Events of a new session are outside until its first position, also those after an earlier node."""
    marks.place_of(310, 11)
    marks.clear()
    assert len(marks) == 0
    assert marks.place_of(320, -1) == (OTHER, -1)
