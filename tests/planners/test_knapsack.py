"""Planners that choose single values: by cost and size, large and cheap ones, and those dropped first."""

from __future__ import annotations

import itertools
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.planners.base import ScheduleRequest
from memprof.planners.graph.arrays import step_from_arrays
from memprof.planners.graph.graph import graph_of
from memprof.planners.graph.recomputation import Recomputation
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.planners.graph.writing import Demand
from memprof.planners.published.dtr import Dtr, Simulation, ValueCost
from memprof.planners.published.knapsack import Knapsack, items_of, pack_exactly, pack_greedily
from memprof.planners.published.selective import Selective, around, cheapest_first
from memprof.policies.evict.victims import HEURISTICS
from memprof.trace.step import Step
from memprof.trace.store import Trace
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


BUILT = (graphs.uneven_chain(15, 3), graphs.unet(3), graphs.residual(5), graphs.random_graph(25, 4))


def fork() -> Step:
    """Two values that backward reads late, of one size, one ten times as dear; a third is the way to both."""
    return step_from_arrays(
        time_us=[5.0, 10.0, 100.0, 1.0, 1.0, 1.0],
        output_bytes=[10, 100, 100, 150, 1, 1],
        inputs=[[], [0], [0], [], [2, 3], [0, 1, 4]],
        is_backward=[False, False, False, False, True, True],
    )


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_the_cheaper_of_two_equal_values_is_evicted(heuristic: str) -> None:
    """With 310 of 360 bytes one value of 100 must go: the one of 10 us, which is made again when it is asked for."""
    graph = graph_of(fork())
    runs = Simulation(ScheduleRequest(graph, 310), 310, heuristic).runs()
    assert runs is not None
    assert runs.tolist() == [0, 1, 2, 3, 4, 1, 5]
    assert replay(graph, runs).extra_us == 10.0


def test_each_heuristic_sums_the_neighbourhood_it_is_defined_by() -> None:
    """In a chain of 1, 2, 4, 8, 16 us with the values 1 and 3 gone, value 2 costs 4 and what hangs together with it."""
    step = graphs.mirrored([[], [0], [1], [2], [3]], [10] * 5, [1.0, 2.0, 4.0, 8.0, 16.0])
    expected = {"local": 4.0, "msps": 4.0 + 2.0, "full": 4.0 + 2.0 + 8.0, "eq-class": 4.0 + 2.0 + 8.0}
    for heuristic, cost_us in expected.items():
        costs = ValueCost(graph_of(step), heuristic)
        costs.evicted(1)
        costs.evicted(3)
        assert costs.cost_us(2) == cost_us, heuristic


def test_classes_are_joined_on_eviction_and_never_split() -> None:
    """With 1, 2 and 3 gone they are one class; 2 made again takes its time out and leaves 1 and 3 together."""
    step = graphs.mirrored([[], [0], [1], [2], [3]], [10] * 5, [1.0, 2.0, 4.0, 8.0, 16.0])
    costs = ValueCost(graph_of(step), "eq-class")
    for value in (1, 2, 3):
        costs.evicted(value)
    assert costs.cost_us(0) == 1.0 + 2.0 + 4.0 + 8.0
    costs.remade(2)
    assert costs.cost_us(0) == 1.0 + 2.0 + 8.0
    assert costs.cost_us(2) == 4.0 + 2.0 + 8.0


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_the_budget_is_never_exceeded(heuristic: str) -> None:
    """Whatever the budget, a schedule that comes back replays within it."""
    for step, percent in itertools.product(BUILT, range(30, 100, 14)):
        graph = graph_of(step)
        peak = replay(graph, as_recorded(graph)).peak_bytes
        budget = peak * percent // 100
        runs = Simulation(ScheduleRequest(graph, budget), budget, heuristic).runs()
        assert runs is None or replay(graph, runs).peak_bytes <= budget


def test_the_fastest_of_the_heuristics_is_kept() -> None:
    """At 80 % of the peak a recorded step has a schedule that fits, as fast as the fastest of the four heuristics."""
    graph = graph_of(Trace.open("sample_traces/lstm/run.memprof").steady_step())
    task = ScheduleRequest(graph, replay(graph, as_recorded(graph)).peak_bytes * 80 // 100)
    found = Dtr().search(task)
    assert found.runs is not None
    done = replay(graph, found.runs)
    assert done.peak_bytes <= task.budget_bytes
    single = [Simulation(task, task.budget_bytes, heuristic).runs() for heuristic in HEURISTICS]
    assert done.extra_us == min(replay(graph, runs).extra_us for runs in single if runs is not None)
