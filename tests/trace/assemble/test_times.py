"""Operators are found in the step without the dispatch mode, and the recorder's allocations removed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.trace.assemble.memory.block_lives import BlockLives, pair
from memprof.trace.assemble.memory.touches import Mergers, find_mergers, merge_lives, wrapped_twice
from memprof.trace.assemble.timeline import NEVER, Timeline, merge
from memprof.trace.assemble.times import Partners, corrected_durations, find_partners, packet
from memprof.trace.schema import NONE, Ints

NAN = float("nan")


def partners(names: list[str], timed: list[tuple[str, int, int]], views: tuple[int, ...] = ()) -> Partners | None:
    """Finds operators among timed ones of (name, nanoseconds, depth); those at `views` do no work."""
    is_work = np.array([number not in views for number in range(len(names))], dtype=np.bool_)
    durations = np.array([duration for _, duration, _ in timed], dtype=np.int64)
    depths = np.array([depth for *_, depth in timed], dtype=np.int64)
    return find_partners(names, is_work, [name for name, *_ in timed], durations, depths)


def flat(names: list[str]) -> list[tuple[str, int, int]]:
    """Gives operators without parts 1000, 2000, ... nanoseconds."""
    return [(name, 1000 * (number + 1), 0) for number, name in enumerate(names)]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("aten.addmm.default", "aten::addmm"),
        ("aten.add_.Tensor", "aten::add_"),
        ("profiler._record_function_enter_new.default", "profiler::_record_function_enter_new"),
        ("mylib.my_op.default", "mylib::my_op"),
        ("flex_attention", "flex_attention::"),
    ],
)
def test_names_are_those_of_the_profiler(name: str, found: str) -> None:
    """The dispatch mode's name becomes the one torch's profiler writes: without overload, with colons."""
    assert packet(name) == found


def test_equal_steps_are_paired_one_to_one() -> None:
    """Each operator takes its own time of the timed step, in microseconds."""
    found = partners(["a", "b", "a"], flat(["a", "b", "a"]))
    assert found is not None
    assert found.duration_us.tolist() == [1.0, 2.0, 3.0]
    assert not found.runs_in_place.any()


def test_composite_operators_above_are_looked_through() -> None:
    """linear is not recorded, its addmm is: what stands above a recorded operator takes no part."""
    found = partners(["t", "addmm"], [("linear", 9000, 0), ("t", 1000, 1), ("addmm", 7000, 1)])
    assert found is not None
    assert found.duration_us.tolist() == [1.0, 7.0]


def test_operators_inside_a_kernel_belong_to_it() -> None:
    """The copy_ that a recorded clone calls is part of the clone, and not the copy_ recorded after it."""
    timed = [("clone", 5000, 0), ("copy_", 4000, 1), ("copy_", 1500, 0)]
    found = partners(["clone", "copy_"], timed)
    assert found is not None
    assert found.duration_us.tolist() == [5.0, 1.5]


def test_a_mode_of_the_jobs_own_costs_no_operator_anything() -> None:
    """Below a dispatch mode each operator is there twice: inside the mode's Python is the kernel."""
    timed = [("a", 9000, 0), ("empty", 100, 1), ("a", 1000, 1), ("b", 9500, 0), ("b", 2000, 1), ("zero", 500, 2)]
    found = partners(["a", "b"], timed)
    assert found is not None
    assert found.duration_us.tolist() == [1.0, 2.0]


def test_an_operator_that_calls_its_own_overload_is_whole() -> None:
    """sum() calls sum over dimensions: one such operator among others is no mode, and keeps its whole time."""
    timed = [("sum", 9000, 0), ("sum", 8000, 1), *flat(["a", "b", "c"])]
    found = partners(["sum", "a", "b", "c"], timed)
    assert found is not None
    assert found.duration_us.tolist() == [9.0, 1.0, 2.0, 3.0]


def test_an_operator_that_runs_in_place_without_the_recorder_is_told() -> None:
    """Recorded add, timed add_: autograd adds in place when no mode is there. add_ recorded as add_ is nothing new."""
    found = partners(["add", "add_", "add"], flat(["add_", "add_", "add"]))
    assert found is not None
    assert found.runs_in_place.tolist() == [True, False, False]


def test_operators_more_or_less_are_skipped() -> None:
    """One operator that only the recorded step has gets no time; one that only the timed step has is passed over."""
    names = ["a", "b", "c", "d", "e", "f", "g"]
    found = partners([*names[:3], "x", *names[3:]], flat(names))
    assert found is not None
    np.testing.assert_array_equal(found.duration_us, [1, 2, 3, NAN, 4, 5, 6, 7])
    found = partners([*names, "x"], flat([*names[:2], "x", *names[2:], "x"]))
    assert found is not None
    assert found.duration_us.tolist() == [1, 2, 4, 5, 6, 7, 8, 9]


def test_a_long_passage_more_is_skipped() -> None:
    """The timed step also evaluated the model, 1000 operators of the same names in another order: training is found."""
    names = ["mm", "relu", "mm", "sum", "mm", "t", "add", "mul", "sub", "div"]
    evaluation = ["t", "relu", "relu", "add"] * 250
    found = partners(names, flat(names[:1] + evaluation + names[1:]))
    assert found is not None
    assert found.duration_us.tolist() == [1.0, *(float(1001 + number) for number in range(1, 10))]


def test_steps_that_differ_too_much_have_no_partners() -> None:
    """More than a fifth of the working operators without a partner: 2 of 10 are tolerated, 3 are not."""
    names = [f"op{number}" for number in range(10)]
    assert partners(names, flat(names[:8])) is not None
    assert partners(names, flat(names[:7])) is None


def test_views_may_be_missing() -> None:
    """A view more or less makes no difference: with 6 views of 10 only in the recorded step, the rest is found."""
    names = ["v0", "v1", "v2", "v3", "v4", "v5", "a", "b", "c", "d"]
    found = partners(names, flat(["a", "b", "c", "d"]), views=(0, 1, 2, 3, 4, 5))
    assert found is not None
    np.testing.assert_array_equal(found.duration_us, [NAN] * 6 + [1, 2, 3, 4])


def test_without_a_timed_step_there_are_no_partners() -> None:
    """Neither where nothing was timed, nor where nothing was recorded."""
    assert partners(["a"], []) is None
    assert partners([], flat(["a"])) is None


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=40), st.data())
def test_partners_are_of_the_same_name_and_in_order(names: list[str], data: st.DataObject) -> None:
    """Whatever the timed step holds, an operator's partner has its name, and partners come in order, each once."""
    timed = flat(data.draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=60)))
    found = partners(names, timed, views=tuple(range(len(names))))
    assert found is not None
    places = [None if np.isnan(us) else int(us) - 1 for us in found.duration_us]
    known = [place for place in places if place is not None]
    assert known == sorted(set(known))
    assert all(place is None or timed[place][0] == name for name, place in zip(names, places, strict=True))


def test_the_modes_own_cost_is_taken_off() -> None:
    """A view does no work: the median view (2000 ns) is the cost of passing the mode; no duration is negative."""
    durations = np.array([10_000, 2000, 1000, 3000, 2500])
    is_view = np.array([False, True, True, True, False])
    assert corrected_durations(durations, is_view).tolist() == [8.0, 0.0, 0.0, 1.0, 0.5]


def test_without_views_durations_stand_as_measured() -> None:
    """The cost of passing the mode is unknown; without operators there is nothing to correct."""
    assert corrected_durations(np.array([5000, 3000]), np.zeros(2, dtype=np.bool_)).tolist() == [5.0, 3.0]
    assert corrected_durations(np.empty(0, dtype=np.int64), np.zeros(0, dtype=np.bool_)).tolist() == []


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
