"""Lifetimes without a recorded free, whose end follows from the allocator's count."""

from __future__ import annotations

import numpy as np

from memprof.trace.assemble.memory.block_lives import BlockLives, count, pair
from memprof.trace.assemble.memory.elsewhere import account, end_buffers_of_collectives, end_missed_frees, reused_ends
from memprof.trace.assemble.timeline import NEVER, Timeline, merge

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
