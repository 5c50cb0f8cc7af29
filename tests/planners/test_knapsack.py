"""Tests of the knapsack planner, which keeps what is expensive to recompute."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.planners.base import ScheduleRequest
from memprof.planners.graph.arrays import step_from_arrays
from memprof.planners.graph.graph import graph_of
from memprof.planners.graph.schedule import replay
from memprof.planners.published.knapsack import Knapsack, items_of, pack_exactly, pack_greedily
from tests.planners import graphs
from tests.planners.promises import peak_bytes


def test_best_pair_beats_the_dearest_one_by_hand() -> None:
    """In a knapsack of 10, weights 6, 5 and 5 worth 10, 7 and 6: the two that fill it are worth 13, the dearest 10."""
    chosen = pack_exactly(np.array([10.0, 7.0, 6.0]), np.array([6, 5, 5]), 16)
    assert chosen[10].tolist() == [False, True, True]
    assert chosen[9].tolist() == [True, False, False]
    assert chosen[5].tolist() == [False, True, False]
    assert chosen[4].tolist() == [False, False, False]
    assert chosen[16].tolist() == [True, True, True]
    assert pack_greedily(np.array([10.0, 7.0, 6.0]), np.array([6, 5, 5]), 10).tolist() == [True, False, False]


@settings(max_examples=60, deadline=None)
@given(items=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=8))
def test_exact_is_the_best_of_all_subsets_for_every_capacity(items: list[tuple[int, int]]) -> None:
    """Every row fits its capacity and is worth as much as the best of all subsets that do; greedy is never above it."""
    worth, weight = np.array([w for w, _ in items], dtype=float), np.array([b for _, b in items])
    chosen = pack_exactly(worth, weight, int(weight.sum()))
    subsets = np.array(list(product([False, True], repeat=len(items))))
    for capacity, row in enumerate(chosen):
        best = (subsets @ worth)[subsets @ weight <= capacity].max()
        assert weight[row].sum() <= capacity
        assert worth[row].sum() == best
        greedy = pack_greedily(worth, weight, capacity)
        assert weight[greedy].sum() <= capacity
        assert worth[greedy].sum() <= best


def test_items_are_what_one_operator_makes_or_single_values() -> None:
    """A value that two others are made from is an item of its own; nothing unsaved is one."""
    step = step_from_arrays(
        time_us=[10.0, 20.0, 30.0, 5.0, 1.0, 1.0],
        output_bytes=[100, 200, 300, 400, 500, 600],
        inputs=[[], [0], [1], [2], [2, 3], [0, 4]],
        is_backward=[False] * 4 + [True] * 2,
    )
    items = items_of(graph_of(step), is_together=True)
    assert items.size_bytes.tolist() == [100, 300, 400]
    # Making value 2 again runs operator 1, too, whose output forward frees.
    assert items.cost_us.tolist() == [10.0, 50.0, 5.0]
    assert items.item_of_value.tolist() == [0, -1, 1, 2]


def test_the_dear_ones_are_kept() -> None:
    """In residual blocks, nothing that the convolutions make is made again at 80 % of the peak."""
    graph = graph_of(graphs.residual(5))
    found = Knapsack().search(ScheduleRequest(graph, int(peak_bytes(graph) * 0.8)))
    assert found.runs is not None
    done = replay(graph, found.runs)
    assert graph.cost_us[done.runs[done.is_again]].max() < 40.0
    assert "knapsack" in found.reason


def test_nothing_saved_is_nothing_to_pack() -> None:
    """A step whose backward needs nothing of forward is answered without a schedule, and without a claim."""
    step = step_from_arrays(
        time_us=[1.0, 1.0, 1.0],
        output_bytes=[100, 100, 100],
        inputs=[[], [0], []],
        is_backward=[False, False, True],
    )
    found = Knapsack().search(ScheduleRequest(graph_of(step), 150))
    assert found.runs is None
    assert found.least_bytes == 200
    assert found.status == "infeasible"
