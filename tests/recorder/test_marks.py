"""Positions by which a light recording attributes memory events."""

from __future__ import annotations

import pytest

from memprof.recorder.light.events import Marks
from memprof.trace.files.spool import BACKWARD, FORWARD, OTHER

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
