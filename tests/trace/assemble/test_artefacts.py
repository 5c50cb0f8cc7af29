"""Allocations of the recorder itself are removed."""

from __future__ import annotations

import numpy as np

from memprof.trace.assemble.memory.block_lives import BlockLives, pair
from memprof.trace.assemble.memory.touches import Mergers, find_mergers, merge_lives, wrapped_twice
from memprof.trace.assemble.timeline import NEVER, Timeline, merge
from memprof.trace.schema import NONE, Ints

_NOTHING = np.empty(0, dtype=np.int64)


def merged_lives(operators: list[tuple[int, int]], events: list[tuple[int, int, int]]) -> tuple[Timeline, BlockLives]:
    starts, ends = np.array(operators, dtype=np.int64).T
    timeline = merge(starts, ends, *np.array(events, dtype=np.int64).reshape(-1, 3).T)
    return timeline, pair(timeline, _NOTHING, _NOTHING)


def ids(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


# Gradients a and b meet in an addition, whose result r goes on: a is freed once r is there.
SUM = [(0, 9), (10, 19), (20, 29)], [(1, 100, 64), (11, 200, 64), (21, 300, 64), (30, 100, -64), (40, 200, -64)]


def test_a_sum_of_gradients_takes_the_place_of_its_first_term() -> None:
    """Unobserved, autograd adds the second gradient into the first; the trace has that one life, as long as both."""
    timeline, lives = merged_lives(*SUM)
    mergers = find_mergers(timeline, lives, ids(2), lives.find(ids(100), ids(2)), lives.find(ids(300), ids(3)))
    assert [mergers.op.tolist(), mergers.kept.tolist(), mergers.dropped.tolist()] == [[2], [0], [2]]
    merged, become, is_void = merge_lives(timeline, lives, mergers)
    assert become.tolist() == [0, 1, 0]
    assert merged.died.tolist() == [NEVER, 4, NEVER]
    assert is_void.tolist() == [False, False, True, True, False]  # r was never taken, a not freed then


def test_a_sum_whose_first_term_lives_on_is_a_sum_of_its_own() -> None:
    """Only where the first input gave way was it the place of the sum; the second operator here frees nothing."""
    timeline, lives = merged_lives([(0, 9), (20, 29)], [(1, 100, 64), (21, 300, 64)])
    mergers = find_mergers(timeline, lives, ids(1), ids(0), ids(1))
    assert mergers.op.tolist() == []


def test_a_sum_of_another_size_is_a_sum_of_its_own() -> None:
    """A gradient that grew by broadcasting cannot have been added in place."""
    timeline, lives = merged_lives([(0, 9), (20, 29)], [(1, 100, 64), (21, 300, 128), (22, 100, -64)])
    assert find_mergers(timeline, lives, ids(1), ids(0), ids(1)).op.tolist() == []


def test_operators_without_known_memory_are_left_alone() -> None:
    """Neither a foreign input nor a result that is its input again makes a pair."""
    timeline, lives = merged_lives(*SUM)
    assert find_mergers(timeline, lives, ids(1, 2), ids(NONE, 2), ids(1, 2)).op.tolist() == []
    assert find_mergers(timeline, lives, _NOTHING, _NOTHING, _NOTHING).op.tolist() == []


def test_a_chain_of_sums_is_one_life() -> None:
    """Four gradients of one tensor meet in three additions: the first takes them all and lasts as long as the last."""
    operators = [(0, 9), (20, 29), (30, 39), (40, 49), (60, 69)]
    events = [(1, 100, 64)]
    events += [(21, 200, 64), (22, 100, -64)]  # r1 = a + b, a gone
    events += [(31, 300, 64), (32, 200, -64)]  # r2 = r1 + c
    events += [(41, 400, 64), (42, 300, -64)]  # r3 = r2 + d
    events += [(61, 400, -64)]
    timeline, lives = merged_lives(operators, events)
    merged, become, is_void = merge_lives(timeline, lives, Mergers(ids(1, 2, 3), ids(0, 1, 2), ids(1, 2, 3)))
    assert become.tolist() == [0, 0, 0, 0]
    assert merged.died.tolist()[0] == 7
    assert is_void.tolist() == [False, *[True] * 6, False]


NUMBER = 4  # bytes of a wrapped float32


def starts(timeline: Timeline, operators: list[tuple[int, int]]) -> Ints:
    """Returns the start of each row's operator; of rows that are none, their own."""
    own = timeline.start_ns.copy()
    own[timeline.raw_op != NONE] = [start for start, _ in operators]
    return own


def test_a_number_wrapped_twice_was_wrapped_once() -> None:
    """x * 2 wraps the 2 before the mode is asked and again below it: the second wrapping is not the job's."""
    operators = [(10, 20)]
    # The number ahead, the number again, the result; the second wrapping goes inside, the first after.
    events = [(5, 1, NUMBER), (11, 2, NUMBER), (12, 3, 64), (13, 2, -NUMBER), (21, 1, -NUMBER)]
    timeline, lives = merged_lives(operators, events)
    assert wrapped_twice(timeline, lives, starts(timeline, operators)).tolist() == [False, True, False]


def test_as_many_wrappings_are_taken_out_as_were_made_ahead() -> None:
    """One number ahead and two such temporaries inside: one of them is the kernel's own."""
    operators = [(10, 20)]
    events = [(5, 1, NUMBER), (11, 2, NUMBER), (12, 2, -NUMBER), (13, 3, NUMBER), (14, 3, -NUMBER), (21, 1, -NUMBER)]
    timeline, lives = merged_lives(operators, events)
    assert wrapped_twice(timeline, lives, starts(timeline, operators)).tolist() == [False, True, False]


def test_small_memory_that_nothing_announces_is_the_operators_own() -> None:
    """A kernel's own small temporary stays, without a number ahead or with one of another size."""
    operators = [(10, 20), (30, 40)]
    events = [(11, 2, NUMBER), (12, 2, -NUMBER), (25, 1, 8), (31, 2, NUMBER), (32, 2, -NUMBER), (41, 1, -8)]
    timeline, lives = merged_lives(operators, events)
    assert not wrapped_twice(timeline, lives, starts(timeline, operators)).any()


def test_a_small_result_is_not_a_wrapped_number() -> None:
    """A loss of 4 bytes made from a number wrapped ahead outlives its operator: it is the job's."""
    operators = [(10, 20)]
    timeline, lives = merged_lives(operators, [(5, 1, NUMBER), (12, 3, NUMBER), (21, 1, -NUMBER)])
    assert not wrapped_twice(timeline, lives, starts(timeline, operators)).any()


def test_large_memory_is_no_number() -> None:
    """The largest number takes 16 bytes; 17 taken ahead and 17 inside are two tensors."""
    operators = [(10, 20)]
    timeline, lives = merged_lives(operators, [(5, 1, 17), (12, 3, 17), (13, 3, -17), (21, 1, -17)])
    assert not wrapped_twice(timeline, lives, starts(timeline, operators)).any()
