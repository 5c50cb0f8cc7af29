"""Lives of blocks, also without a recorded free, and the counter they add up to."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from memprof.trace.assemble.memory.block_lives import BlockLives, Counter, count, pair
from memprof.trace.assemble.memory.elsewhere import account, end_buffers_of_collectives, end_missed_frees, reused_ends
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


KIB = 1024


Event = tuple[int, int, int]


def recorded(events: list[Event]) -> tuple[Timeline, BlockLives, np.ndarray]:
    """One operator of 10 ns for each event, which is reported in its middle.

    Args:
        events: Address, bytes (negative for a free) and the allocator's count after each.
    """
    start = np.arange(len(events), dtype=np.int64) * 10
    address, size, total = np.array(events, dtype=np.int64).T
    timeline = merge(start, start + 9, start + 5, address, size)
    none = np.empty(0, dtype=np.int64)
    return timeline, pair(timeline, none, none), total


def test_a_life_ends_where_the_count_falls_by_its_size() -> None:
    """Two blocks of 4 and 6 KiB are taken; when 1 KiB is taken next, the count has fallen by 6 KiB."""
    events = [(100, 4 * KIB, 4 * KIB), (200, 6 * KIB, 10 * KIB), (300, KIB, 5 * KIB), (100, -4 * KIB, KIB)]
    timeline, lives, totals = recorded(events)
    assert lives.died.tolist() == [3, NEVER, NEVER]
    lives = end_missed_frees(timeline, lives, totals)
    assert lives.died.tolist() == [3, 2, NEVER]


def test_two_lives_end_at_once() -> None:
    """The count falls by 3 + 6 KiB: no block of 9 KiB is there, but those two are."""
    events = [(1, 3 * KIB, 3 * KIB), (2, 5 * KIB, 8 * KIB), (3, 6 * KIB, 14 * KIB), (4, KIB, 6 * KIB)]
    timeline, lives, totals = recorded(events)
    assert end_missed_frees(timeline, lives, totals).died.tolist() == [3, NEVER, 3, NEVER]


def test_a_fall_that_is_no_block_ends_nothing() -> None:
    """The count falls by 2 KiB that another thread had taken before: both blocks live on."""
    events = [(1, 3 * KIB, 3 * KIB), (2, 5 * KIB, 8 * KIB), (3, KIB, 7 * KIB)]
    timeline, lives, totals = recorded(events)
    assert end_missed_frees(timeline, lives, totals).died.tolist() == [NEVER] * 3


def test_the_counter_is_the_allocators() -> None:
    """Whether the next event is a taking or a free: the counter follows the allocator's own."""
    for last in ((300, KIB, 5 * KIB), (100, -4 * KIB, 0)):
        events = [(100, 4 * KIB, 4 * KIB), (200, 6 * KIB, 10 * KIB), last, (400, 2 * KIB, last[2] + 2 * KIB)]
        timeline, lives, totals = recorded(events)
        lives = end_missed_frees(timeline, lives, totals)
        elsewhere = account(timeline, lives, totals)
        assert not len(elsewhere.size_bytes)
        nothing = np.zeros(len(events), dtype=np.bool_)
        counter = count(timeline, lives, 0, nothing, elsewhere.change, elsewhere.relief)
        assert counter.peak[-1] == last[2] + 2 * KIB


def collected(events: list[Event], operators: list[tuple[int, int]], touched: list[int]) -> tuple[list[int], list[int]]:
    """Ends buffers of the first of some operators, a collective; returns where lives end, and the bytes that end there.

    Args:
        events: Time, address and bytes of each.
        operators: Start and end of each.
        touched: Lives of which the collective used a tensor.
    """
    start, end = np.array(operators, dtype=np.int64).T
    time, address, size = np.array(events, dtype=np.int64).T
    timeline = merge(start, end, time, address, size)
    none = np.empty(0, dtype=np.int64)
    is_collective = np.arange(len(timeline.raw_op)) == 0
    lives = pair(timeline, none, none)
    lives = end_buffers_of_collectives(timeline, lives, is_collective, np.array(touched, dtype=np.int64))
    return lives.died.tolist(), reused_ends(timeline, lives).tolist()


def test_a_buffer_of_a_collective_ends_with_it() -> None:
    """Taken inside and never freed, or freed where its address is used again: a thread of gloo freed it unseen."""
    taken = [(1, 100, 8), (2, 200, 16), (12, 300, 4)]
    assert collected(taken, [(0, 9), (10, 19)], []) == ([1, 2, NEVER], [0, -8, -16])
    again = [(1, 100, 8), (2, 200, 16), (12, 200, 4)]
    assert collected(again, [(0, 9), (10, 19)], [])[0] == [1, 2, NEVER]


def test_results_and_other_memory_live_on() -> None:
    """What the collective returned is a tensor; what a later operator or the collective itself freed has its end."""
    events = [(1, 100, 8), (2, 200, 16), (3, 200, -16), (12, 300, 4)]
    assert collected(events, [(0, 9), (10, 19)], touched=[0])[0] == [NEVER, 2, NEVER]


def test_a_buffer_whose_address_is_used_again_within_the_collective_ends_there() -> None:
    """Two blocks at one address never overlap."""
    events = [(1, 100, 8), (2, 100, 8), (3, 200, 16), (12, 300, 4)]
    assert collected(events, [(0, 9), (10, 19)], []) == ([1, 2, 3, NEVER], [0, 0, -8, -16])
