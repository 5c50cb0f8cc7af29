"""Tests of values offloaded to host memory, and of the planner that offloads them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.errors import InvariantError
from memprof.planners.base import ScheduleRequest
from memprof.planners.graph.arrays import step_from_arrays
from memprof.planners.graph.graph import Graph, graph_of
from memprof.planners.graph.moves import Absence, Moves, Windows, needed_runs, waits_us
from memprof.planners.graph.schedule import as_recorded, replay, scheduled_step
from memprof.planners.published.swap import SwapOut
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from tests.planners import graphs
from tests.planners.promises import peak_bytes, step_named


def chain_of_six() -> Graph:
    """Six layers of 1000 bytes and 10 us, then their backwards of 20 us: value i is read by operators i + 1, 10 - i."""
    return graph_of(graphs.chain(6, output_bytes=1000, time_us=10.0))


def moved(*rows: tuple[int, int, int, int], link: float = 100.0) -> Moves:
    """Returns moves of (value, leave_run, gone_run, back_run)."""
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return Moves(*columns, link_bytes_per_us=link)


def test_memory_of_what_is_away_does_not_count() -> None:
    """A value takes memory until its copy out is complete, and again from where its copy back begins."""
    graph = chain_of_six()
    here = replay(graph, as_recorded(graph)).during_bytes
    away = replay(graph, as_recorded(graph), moved((0, 1, 2, 8))).during_bytes
    assert (here - away).tolist() == [0, 0, 0, 1000, 1000, 1000, 1000, 1000, 0, 0, 0, 0]


def test_copies_that_fit_between_cost_nothing() -> None:
    """1000 bytes at 100 bytes/us take 10 us: out during operator 2, back during operator 9, needed by operator 10."""
    graph = chain_of_six()
    done = replay(graph, as_recorded(graph), moved((0, 1, 2, 9)))
    assert (done.extra_us, done.stall_us) == (0.0, 0.0)


def test_waits_by_hand() -> None:
    """At 40 bytes/us a copy takes 25 us: out from 20 us to 45 us, waited for at 30 us; back from 140 us, in 20 us."""
    graph = chain_of_six()
    # Operator 2 ends at 30 us: 15 us of waiting. Operator 9 begins at 120 + 15 us and runs 20 us; 5 us are missing.
    moves = moved((0, 1, 2, 9), link=40.0)
    waits = waits_us(moves, np.array([10]), graph.value_bytes, graph.cost_us)
    assert {run: wait for run, wait in enumerate(waits.tolist()) if wait} == {3: 15.0, 10: 5.0}
    assert replay(graph, as_recorded(graph), moves).stall_us == 20.0


def test_each_direction_is_one_queue_and_they_do_not_wait_for_each_other() -> None:
    """Two values that leave at once go one after the other; one that comes back meanwhile does not wait for them."""
    step = step_from_arrays(
        time_us=[10.0] * 8,
        output_bytes=[1000] * 8,
        inputs=[[], [], [1], [0], [1], [], [0, 1], []],
        is_backward=[False] * 5 + [True] * 3,
    )
    graph = graph_of(step)
    # 0 leaves after 0 and comes back with 2; 0 and 1 leave after 4, at 50 us, and have to be gone when 4 has run.
    one = waits_us(moved((0, 0, 1, 2)), np.array([3]), graph.value_bytes, graph.cost_us)
    assert one.sum() == 0
    two = waits_us(moved((0, 4, 4, 6), (1, 4, 4, 6)), np.array([6, 6]), graph.value_bytes, graph.cost_us)
    # Both copies out, 20 us, before operator 5; both back, 20 us, before operator 6.
    assert two.tolist() == [0, 0, 0, 0, 0, 20.0, 20.0, 0, 0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((3, 1, 2, 6), "before it is made"),
        ((0, 10, 10, 11), "not read again"),
        ((0, 1, 3, 3), "before it is offloaded"),
        ((0, 1, 2, 11), "after it is read"),
        ((0, 2, 1, 9), "before it is offloaded"),
    ],
)
def test_moves_that_make_no_sense_are_refused(row: tuple[int, int, int, int], message: str) -> None:
    """A value cannot leave before it is made, after its last reader, or come back after it is read."""
    graph = chain_of_six()
    with pytest.raises(InvariantError, match=message):
        replay(graph, as_recorded(graph), moved(row))


def test_nothing_leaves_twice_at_once() -> None:
    """Two moves of one value in one gap are refused."""
    graph = chain_of_six()
    with pytest.raises(InvariantError, match="already offloaded"):
        replay(graph, as_recorded(graph), moved((0, 1, 2, 9), (0, 2, 3, 9)))


def test_copies_go_out_at_once_and_come_back_late() -> None:
    """Two values leave in the order in which they are free and come back just in time, the one needed first first."""
    graph = chain_of_six()
    windows = Windows(graph, replay(graph, as_recorded(graph)), 50.0)
    placed = windows.place([Absence(0, 1, gone_op=12), Absence(1, 2, gone_op=12)])
    # 20 us each. 0 is free at 20 us and out at 40, while 3 runs; 1 is free at 30 and goes from 40 to 60, while 5 runs.
    assert placed.gone_run.tolist() == [3, 5]
    # 1 is needed by 9, at 120 us, and 0 by 10, at 140 us: each takes the 20 us of the operator before.
    assert placed.back_run.tolist() == [9, 8]
    assert placed.is_hidden.all()
    assert windows.idle_us(np.array([0, 1]), np.array([1, 2])).tolist() == [120.0 - 40, 90.0 - 40]


def test_swapping_what_hides_takes_the_longest_idle_first() -> None:
    """A budget one layer below the peak is kept by moving the first layer's output, at no cost."""
    graph = graph_of(graphs.chain(12))
    found = SwapOut().search(ScheduleRequest(graph, peak_bytes(graph) - 1000, link_bytes_per_us=1000.0))
    assert found.moves is not None
    assert found.moves.value.tolist() == [0]
    assert found.stall_us == 0
    assert "whose copies are hidden" in found.reason


def test_a_slow_link_makes_again_what_is_cheap_and_a_dear_value_waits() -> None:
    """With no time to hide copies, a cheap value is made again, and one that took long to make is waited for."""

    def answer(cost_us: float) -> tuple[float, float]:
        # Value 1 is idle from operator 2 to operator 5, while operator 3 needs memory of its own. Making it again runs
        # operator 0, too, whose output forward frees.
        step = step_from_arrays(
            time_us=[1.0, cost_us, 1.0, 1.0, 1.0, 1.0],
            output_bytes=[100, 5000, 100, 100, 100, 100],
            inputs=[[], [0], [1], [2], [3], [1, 4]],
            is_backward=[False] * 4 + [True] * 2,
            workspace_bytes=[0, 0, 0, 5000, 0, 0],
        )
        graph = graph_of(step)
        found = SwapOut().search(ScheduleRequest(graph, peak_bytes(graph) - 5000, link_bytes_per_us=50.0))
        assert found.runs is not None
        return replay(graph, found.runs).extra_us, found.stall_us

    assert answer(cost_us=10.0) == (11.0, 0.0)
    # 100 us out before operator 3 may begin, and 100 us back, of which operator 4 hides one.
    assert answer(cost_us=5000.0) == (0.0, 199.0)


def test_without_a_link_it_says_so() -> None:
    """Where no bandwidth to host memory is known, nothing is invented, and a budget that is met is still met."""
    graph = graph_of(graphs.chain(12))
    found = SwapOut().search(ScheduleRequest(graph, 6000))
    assert found.status == "nothing found"
    assert "bandwidth" in found.reason
    assert found.least_bytes == peak_bytes(graph)
    assert SwapOut().search(ScheduleRequest(graph, found.least_bytes)).status == "optimal"


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), link=st.sampled_from([5.0, 100.0, 2000.0]), share=st.floats(0.5, 0.95))
def test_hidden_copies_are_never_waited_for(seed: int, link: float, share: float) -> None:
    """Whatever is placed as hidden costs nothing in the replay."""
    graph = graph_of(graphs.random_graph(25, seed))
    done = replay(graph, as_recorded(graph))
    rows = [(value, op_id) for value, op_id in enumerate(graph.last_forward_read().tolist()) if graph.is_saved()[value]]
    windows = Windows(graph, done, link)
    chosen: list[Absence] = []
    for value, op_id in rows[: int(len(rows) * share)]:
        placed = windows.place([*chosen, Absence(value, op_id, gone_op=graph.ops)])
        if placed.is_hidden.all():
            chosen.append(Absence(value, op_id, gone_op=graph.ops))
    moves = windows.place(chosen).moves
    assert replay(graph, as_recorded(graph), moves).stall_us == pytest.approx(0, abs=1e-6)


def check_moved_step(step: Step, graph: Graph, budget_bytes: int, link: float) -> None:
    """Writes what is found as a step and compares the two replays."""
    found = SwapOut().search(ScheduleRequest(graph, budget_bytes, link_bytes_per_us=link))
    assert found.runs is not None
    assert found.moves is not None
    done = replay(graph, found.runs, found.moves)
    scheduled = scheduled_step(step, graph, found.runs, found.moves)
    is_copy = scheduled.ops.kind == "copy"
    is_copy &= np.isin(scheduled.ops.name, ["memprof.swap_out", "memprof.swap_in"])
    during = live_bytes(scheduled).during
    # Beside the copies, its operators are the runs, and hold to the byte what the schedule holds.
    assert during[~is_copy].tolist() == done.during_bytes.tolist()
    assert during.max() == done.peak_bytes <= budget_bytes
    assert is_copy.sum() == 2 * len(found.moves) > 0
    assert scheduled.duration_us == pytest.approx(step.duration_us + done.extra_us + done.stall_us)


@pytest.mark.parametrize(("name", "share"), [("gpt", 0.4), ("resnet", 0.5), ("lstm", 0.8)])
def test_schedule_of_a_recording_becomes_a_step_with_the_same_bytes(name: str, share: float) -> None:
    """What is found for a recording can be written as a step with copies, whose own replay has the promised bytes."""
    step = step_named(name)
    graph = graph_of(step)
    check_moved_step(step, graph, int(peak_bytes(graph) * share), link=12_000.0)


@pytest.mark.parametrize("seed", range(4))
def test_schedule_of_a_random_graph_becomes_a_step_with_the_same_bytes(seed: int) -> None:
    """The same where values leave between any two of their readers, and others are made again from them."""
    step = graphs.random_graph(30, seed)
    graph = graph_of(step)
    check_moved_step(step, graph, int(peak_bytes(graph) * 0.75), link=40.0)


def test_a_value_that_leaves_twice_is_written_as_two_returns() -> None:
    """A storage that leaves, comes back and leaves again has the promised bytes at every operator of its step."""
    # Value 0 is read by 1, 4 and 8: it can leave after 1 and after 4.
    step = step_from_arrays(
        time_us=[10.0] * 10,
        output_bytes=[1000] * 10,
        inputs=[[], [0], [1], [2], [0, 3], [4], [5], [6], [0, 7], [8]],
        is_backward=[False] * 6 + [True] * 4,
    )
    graph = graph_of(step)
    moves = moved((0, 1, 1, 3), (0, 4, 5, 7))
    assert needed_runs(replay(graph, as_recorded(graph)), moves).tolist() == [4, 8]
    scheduled = scheduled_step(step, graph, as_recorded(graph), moves)
    during = live_bytes(scheduled).during[~np.isin(scheduled.ops.name, ["memprof.swap_out", "memprof.swap_in"])]
    assert during.tolist() == replay(graph, as_recorded(graph), moves).during_bytes.tolist()
