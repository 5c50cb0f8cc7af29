"""Tests of the planner that drops what is large and cheap to recompute."""

from __future__ import annotations

import numpy as np
import pytest

from memprof.planners.base import ScheduleRequest
from memprof.planners.graph.arrays import step_from_arrays
from memprof.planners.graph.graph import graph_of
from memprof.planners.graph.recomputation import Recomputation
from memprof.planners.graph.schedule import replay
from memprof.planners.graph.writing import Demand
from memprof.planners.published.selective import Selective, around, cheapest_first
from tests.planners import graphs
from tests.planners.promises import peak_bytes


def saved_in_order(step_inputs: list[list[int]], sizes: list[int], times: list[float]) -> list[list[int]]:
    """Returns what is dropped after each turn of cheapest_first, of the values that backward reads."""
    graph = graph_of(graphs.mirrored(step_inputs, sizes, times, needs_output=[True] * len(sizes)))
    return [np.flatnonzero(dropped & graph.is_saved()).tolist() for dropped in cheapest_first(graph)]


def test_cheap_and_large_goes_first() -> None:
    """Attention's scores go before an activation's output, and the result of a large product last."""
    # Input, product (40 us for 100 B), scores (5 us for 1000 B), activation (2 us for 200 B), product (90 us, 100 B).
    inputs: list[list[int]] = [[], [0], [1], [2], [3]]
    turns = saved_in_order(inputs, [100, 100, 1000, 200, 100], [30.0, 40.0, 5.0, 2.0, 90.0])
    # By microseconds for each byte: 0.3, 0.4, 0.005, 0.01, 0.9.
    assert turns == [[2], [2, 3], [0, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_what_runs_again_anyway_costs_nothing_more() -> None:
    """Two saved values made from one that forward frees share its operator: the second costs only its own."""
    step = step_from_arrays(
        time_us=[10.0, 20.0, 30.0, 40.0, 1.0],
        output_bytes=[100] * 5,
        inputs=[[], [0], [1], [1], [0, 2, 3]],
        is_backward=[False] * 4 + [True],
    )
    remaking = Recomputation(graph_of(step))
    assert (remaking.added_us(2), remaking.added_us(3)) == (50.0, 60.0)
    assert remaking.drop(2) == {3}
    assert remaking.added_us(3) == 40.0
    assert remaking.cost_us == 50.0


def test_values_that_forward_frees_are_made_again_on_the_way() -> None:
    """Dropping a value runs what led to it again, back to what is kept."""
    step = step_from_arrays(
        time_us=[10.0, 20.0, 30.0, 5.0, 1.0, 1.0],
        output_bytes=[100] * 6,
        inputs=[[], [0], [1], [2], [2, 3], [0, 4]],
        is_backward=[False] * 4 + [True] * 2,
    )
    graph = graph_of(step)
    remaking = Recomputation(graph)
    # Value 1 is gone after forward; 0 is read by the last operator and stays.
    assert remaking.dropped.tolist()[:4] == [False, True, False, False]
    assert remaking.added_us(2) == 20.0 + 30.0
    assert remaking.drop(0) == set()
    assert remaking.cost_us == 10.0


def test_estimate_is_what_the_schedule_costs() -> None:
    """On a chain the cost that the order goes by is the time that the replay finds."""
    graph = graph_of(graphs.uneven_chain(20, seed=5))
    remaking, demand = Recomputation(graph), Demand(graph)
    for value in np.flatnonzero(graph.is_saved()).tolist()[::2]:
        remaking.drop(value)
        assert replay(graph, demand.schedule(remaking.dropped)).extra_us == pytest.approx(remaking.cost_us)


def test_around_names_the_step_s_own_operators() -> None:
    """A peak in a run that repeats lies between the two operators of the step around it."""
    graph = graph_of(graphs.chain(3))
    done = replay(graph, np.array([0, 1, 2, 3, 0, 4, 5]))
    assert around(done, 4, 4) == (3, 4)
    assert around(done, 1, 2) == (0, 3)
    assert around(done, 0, 6) == (-1, 6)


def test_expensive_operators_are_kept_where_others_do() -> None:
    """In residual blocks, nothing that the convolutions make is made again at 80 % of the peak."""
    graph = graph_of(graphs.residual(5))
    found = Selective().search(ScheduleRequest(graph, int(peak_bytes(graph) * 0.8)))
    assert found.runs is not None
    done = replay(graph, found.runs)
    assert graph.cost_us[done.runs[done.is_again]].max() < 40.0
    assert "cheapest to recompute" in found.reason
