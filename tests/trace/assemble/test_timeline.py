"""Operators and allocation events in one order."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from memprof.trace.assemble.timeline import Timeline, merge
from memprof.trace.schema import NONE
from tests.trace.assemble.conftest import Moments, jobs


def merged(operators: list[tuple[int, int]], events: list[tuple[int, int, int]]) -> Timeline:
    """Merges operators (start, end) and events (time, address, bytes)."""
    starts, ends = np.array(operators, dtype=np.int64).reshape(-1, 2).T
    return merge(starts, ends, *np.array(events, dtype=np.int64).reshape(-1, 3).T)


def test_events_belong_to_the_operator_running() -> None:
    """What happens between an operator's start and end, both included, is its own."""
    timeline = merged([(10, 20), (30, 40)], [(10, 1, 8), (20, 2, 8), (30, 3, 8), (35, 3, -8), (40, 1, -8)])
    assert timeline.raw_op.tolist() == [0, 1]
    assert timeline.event_op.tolist() == [0, 0, 1, 1, 1]
    assert timeline.event_is_inside.all()


def test_a_free_between_operators_belongs_to_the_one_before() -> None:
    """Memory given back between two operators outlived the first, and was not its work; no row is made for it."""
    timeline = merged([(10, 20), (30, 40)], [(12, 1, 8), (25, 1, -8), (45, 2, -8)])
    assert timeline.raw_op.tolist() == [0, 1]
    assert timeline.event_op.tolist() == [0, 0, 1]
    assert timeline.event_is_inside.tolist() == [True, False, False]


def test_memory_taken_just_before_an_operator_is_its_own() -> None:
    """A number wrapped as a tensor ahead of an operator belongs to it, as does all taken after the last free."""
    timeline = merged([(10, 20), (30, 40)], [(22, 9, -8), (25, 1, 4), (26, 2, 4), (41, 1, -4), (42, 2, -4)])
    assert timeline.raw_op.tolist() == [0, 1]
    assert timeline.event_op.tolist() == [0, 1, 1, 1, 1]
    assert timeline.event_is_inside.tolist() == [False, True, True, False, False]


def test_memory_taken_and_given_back_between_operators_has_its_own_row() -> None:
    """A block that comes and goes between two operators is in neither, but in a row that begins when it is taken."""
    timeline = merged([(10, 20), (30, 40)], [(22, 1, 8), (25, 1, -8)])
    assert timeline.raw_op.tolist() == [0, NONE, 1]
    assert timeline.start_ns.tolist() == [10, 22, 30]
    assert timeline.event_op.tolist() == [1, 1]
    assert not timeline.event_is_inside.any()
    assert timeline.row_of_raw(2).tolist() == [0, 2]


def test_each_taking_after_a_free_between_operators_begins_a_row() -> None:
    """Taken twice, freed once, taken, freed: two rows, and what is taken last is the next operator's."""
    events = [(21, 1, 8), (22, 2, 8), (23, 1, -8), (24, 3, 8), (25, 3, -8), (26, 2, -8), (27, 4, 8)]
    timeline = merged([(10, 20), (30, 40)], events)
    assert timeline.raw_op.tolist() == [0, NONE, NONE, 1]
    assert timeline.start_ns.tolist() == [10, 21, 24, 30]
    assert timeline.event_op.tolist() == [1, 1, 1, 2, 2, 2, 3]
    assert timeline.event_is_inside.tolist() == [False] * 6 + [True]


def test_memory_before_the_first_operator() -> None:
    """Frees before anything belong to no row; memory that comes and goes before the first operator has a row."""
    timeline = merged([(10, 20)], [(1, 7, -8), (2, 1, 8), (3, 1, -8), (4, 8, -8)])
    assert timeline.raw_op.tolist() == [NONE, 0]
    assert timeline.event_op.tolist() == [NONE, 0, 0, 0]


def test_memory_taken_after_the_last_operator_has_a_row() -> None:
    """There is no operator to follow that it could belong to."""
    timeline = merged([(10, 20)], [(25, 1, 8), (26, 2, 8)])
    assert timeline.raw_op.tolist() == [0, NONE]
    assert timeline.event_op.tolist() == [1, 1]


def test_events_are_put_in_order_of_time() -> None:
    """Events received late, as by weak references, are placed where they happened; ties stay in the order received."""
    timeline = merged([(10, 20)], [(15, 1, 8), (12, 2, 8), (15, 1, -8)])
    assert timeline.event_time_ns.tolist() == [12, 15, 15]
    assert timeline.event_bytes.tolist() == [8, 8, -8]
    assert timeline.position(np.array([11, 12, 14, 15])).tolist() == [0, 1, 1, 3]


def test_an_event_at_the_moment_two_operators_meet_is_the_second_ones() -> None:
    """Clocks tie: an operator that starts when another ends takes the event of that moment."""
    assert merged([(10, 20), (20, 30)], [(20, 1, 8)]).event_op.tolist() == [1]


@given(jobs())
def test_rows_keep_the_order_of_time(job: Moments) -> None:
    """Operators keep their order, rows start in order, events never go back, and no taking is left without a row."""
    timeline = merged(job.operators, job.events)
    raw = timeline.raw_op[timeline.raw_op != NONE]
    assert raw.tolist() == list(range(len(job.operators)))
    assert (np.diff(timeline.start_ns) >= 0).all()
    assert (np.diff(timeline.event_op) >= 0).all()
    assert (timeline.event_op[timeline.event_bytes > 0] != NONE).all()
    assert (timeline.start_ns[timeline.row_of_raw(len(raw))] == [start for start, _ in job.operators]).all()


@given(jobs())
def test_rows_between_operators_are_made_only_for_what_ends_before_the_next(job: Moments) -> None:
    """Each row that is no operator holds a taking, and a free follows before the next operator, if there is one."""
    timeline = merged(job.operators, job.events)
    for row in np.flatnonzero(timeline.raw_op == NONE):
        changes = timeline.event_bytes[timeline.event_op == row]
        assert changes[0] > 0
        assert (timeline.raw_op[row:] == NONE).all() or changes[-1] < 0
