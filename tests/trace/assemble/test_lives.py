"""Lives of blocks, and the counter they add up to."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from memprof.trace.assemble.memory.block_lives import BlockLives, Counter, count, pair
from memprof.trace.assemble.timeline import NEVER, Timeline, merge
from memprof.trace.schema import NONE, Ints
from tests.trace.assemble.conftest import Moments, jobs


def merged(operators: list[tuple[int, int]], events: list[tuple[int, int, int]]) -> Timeline:
    starts, ends = np.array(operators, dtype=np.int64).reshape(-1, 2).T
    return merge(starts, ends, *np.array(events, dtype=np.int64).reshape(-1, 3).T)


def paired(timeline: Timeline, alive: dict[int, int]) -> BlockLives:
    return pair(timeline, np.array(list(alive), dtype=np.int64), np.array(list(alive.values()), dtype=np.int64))


def told(lives: BlockLives) -> list[tuple[int, int, int, int]]:
    """Lists lives as (address, bytes, event that began it, event that ended it)."""
    columns = (lives.address, lives.size_bytes, lives.born, lives.died)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def counted(timeline: Timeline, lives: BlockLives) -> Counter:
    """Follows the counter of a job with complete events."""
    start = int(lives.size_bytes[lives.born == NONE].sum())
    is_void = np.zeros(len(timeline.event_bytes), dtype=np.bool_)
    extra = np.zeros(len(timeline.event_bytes), dtype=np.int64)
    return count(timeline, lives, start, is_void, extra, np.zeros(len(timeline.raw_op), dtype=np.int64))


def test_an_address_used_again_is_another_life() -> None:
    """Allocators give an address out again within microseconds; each taking ends with the free that follows it."""
    lives = paired(merged([(0, 9)], [(1, 7, 8), (2, 7, -8), (3, 7, 16), (4, 7, -16), (5, 7, 8)]), {})
    assert told(lives) == [(7, 8, 0, 1), (7, 16, 2, 3), (7, 8, 4, NEVER)]


def test_a_free_of_an_unknown_block_ends_a_life_from_before() -> None:
    """What is freed without having been allocated was there before, with the size in the free."""
    assert told(paired(merged([(0, 9)], [(1, 7, -24), (2, 7, 8)]), {})) == [(7, 24, NONE, 0), (7, 8, 1, NEVER)]


def test_what_was_alive_ends_with_its_free() -> None:
    """Blocks known to be alive before are the same lives as those freed later; the others never end."""
    assert told(paired(merged([(0, 9)], [(1, 7, -24)]), {7: 24, 8: 32})) == [(7, 24, NONE, 0), (8, 32, NONE, NEVER)]


def test_taking_an_address_that_is_taken_ends_the_life_before() -> None:
    """A second allocation at one address means that the free between was missed; bytes are not counted twice."""
    timeline = merged([(0, 2), (5, 9)], [(1, 7, 8), (6, 7, 16)])
    lives = paired(timeline, {})
    assert told(lives) == [(7, 8, 0, 1), (7, 16, 1, NEVER)]
    counter = counted(timeline, lives)
    assert counter.before.tolist() == [0, 8]
    assert counter.peak.tolist() == [8, 16]


def test_lives_are_found_by_address_and_moment() -> None:
    """After this many events, an address maps to its current lifetime, or none."""
    lives = paired(merged([(0, 9)], [(1, 7, 8), (2, 7, -8), (3, 7, 16), (4, 9, 8)]), {5: 8})
    assert told(lives) == [(5, 8, NONE, NEVER), (7, 8, 0, 1), (7, 16, 2, NEVER), (9, 8, 3, NEVER)]
    address = np.array([7, 7, 7, 7, 5, 5, 9, 9, 4, 99])
    events = np.array([0, 1, 2, 3, 0, 4, 3, 4, 4, 4])
    # A free takes effect with its event: after event 1, the second, the first life at 7 is over.
    assert lives.find(address, events).tolist() == [NONE, 1, NONE, 2, 0, 0, NONE, 3, NONE, NONE]


def test_the_peak_of_an_operator_is_the_counters_highest_value_in_it() -> None:
    """100 bytes are there; the operator takes 10 and 50, gives the 10 back, takes 20: 160, then 150, then 170."""
    timeline = merged([(0, 9)], [(1, 1, 10), (2, 2, 50), (3, 1, -10), (4, 3, 20)])
    counter = counted(timeline, paired(timeline, {9: 100}))
    assert counter.before.tolist() == [100]
    assert counter.peak.tolist() == [170]


def test_memory_that_comes_and_goes_inside_an_operator_is_temporary() -> None:
    """So is not what is freed after it, before another begins, nor what another operator frees."""
    timeline = merged([(0, 9), (20, 29)], [(1, 1, 8), (2, 1, -8), (3, 2, 8), (4, 3, 8), (12, 2, -8), (21, 3, -8)])
    counter = counted(timeline, paired(timeline, {}))
    assert counter.is_temporary.tolist() == [True, False, False]


def test_frees_between_operators_leave_before_the_next() -> None:
    """What is freed after an operator is there during it, and not when the next one begins."""
    timeline = merged([(0, 9), (20, 29)], [(1, 1, 64), (12, 1, -64), (21, 2, 8)])
    counter = counted(timeline, paired(timeline, {}))
    assert counter.before.tolist() == [0, 0]
    assert counter.peak.tolist() == [64, 8]


def test_memory_between_operators_is_counted_in_its_own_row() -> None:
    """Autograd takes 64 bytes and gives them back between two operators: a row with that peak, none for the others."""
    timeline = merged([(0, 9), (20, 29)], [(11, 1, 64), (12, 1, -64), (21, 2, 8)])
    counter = counted(timeline, paired(timeline, {}))
    assert counter.before.tolist() == [0, 0, 0]
    assert counter.peak.tolist() == [0, 64, 8]


def test_void_events_change_nothing() -> None:
    """Events that only watching caused are left out of the counter."""
    timeline = merged([(0, 9)], [(1, 1, 4), (2, 2, 8), (3, 1, -4)])
    lives = paired(timeline, {})
    nothing = np.zeros(3, dtype=np.int64)
    counter = count(timeline, lives, 0, np.array([True, False, True]), nothing, np.zeros(1, dtype=np.int64))
    assert counter.peak.tolist() == [8]


def test_bytes_of_others_are_counted() -> None:
    """Another thread allocated 1000 bytes before the second event, and had freed 30 when the operator ran."""
    timeline = merged([(0, 9)], [(1, 1, 4), (2, 2, 8)])
    is_void = np.zeros(2, dtype=np.bool_)
    counter = count(timeline, paired(timeline, {}), 50, is_void, np.array([0, 1000]), np.array([-30]))
    assert counter.before.tolist() == [20]
    assert counter.peak.tolist() == [1062]


def replayed(timeline: Timeline, lives: BlockLives, counter: Counter) -> tuple[Ints, int]:
    """Replays lives as a trace does: returns the bytes before each row, and those at the end."""
    rows = len(timeline.raw_op)
    born, died = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
    at_start = 0
    for life in np.flatnonzero(~counter.is_temporary).tolist():
        size, birth, death = int(lives.size_bytes[life]), int(lives.born[life]), int(lives.died[life])
        first = NONE if birth == NONE else int(timeline.event_op[birth])
        last = int(timeline.event_op[death]) if death != NEVER else None
        if last == NONE:
            continue  # gone before the first operator: in no row of the trace
        if first == NONE:
            at_start += size
        else:
            born[first] += size
        if last is not None:
            died[last] += size
    before = at_start + np.cumsum(born) - born - (np.cumsum(died) - died)
    return before, int(at_start + born.sum() - died.sum())


@given(jobs())
def test_the_replay_is_the_allocators_counter(job: Moments) -> None:
    """Of any job: the bytes of the lives there before each row, and each row's peak, are those of a walk over events.

    So live bytes and workspace, the rest of the peak, sum to the counter's maximum; no byte is lost.
    """
    timeline = merged(job.operators, job.events)
    lives = paired(timeline, job.alive)
    counter = counted(timeline, lives)
    before, at_end = replayed(timeline, lives, counter)

    rows = len(timeline.raw_op)
    total = sum(job.alive.values())
    total += int(timeline.event_bytes[timeline.event_op == NONE].sum())
    entering, highest = [], []
    for row in range(rows):
        entering.append(total)
        peak = total
        for event in np.flatnonzero(timeline.event_op == row).tolist():
            total += int(timeline.event_bytes[event])
            if timeline.event_is_inside[event] or timeline.event_bytes[event] > 0:
                peak = max(peak, total)
        highest.append(peak)
    assert before.tolist() == entering
    assert counter.before.tolist() == entering
    assert counter.peak.tolist() == highest
    assert at_end == sum(job.alive.values()) + sum(size for _, _, size in job.events)
