"""Dynamic Tensor Rematerialization."""

from __future__ import annotations

import itertools

import pytest

from memprof.planners.base import ScheduleRequest
from memprof.planners.graph.arrays import step_from_arrays
from memprof.planners.graph.graph import graph_of
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.planners.published.dtr import Dtr, Simulation, ValueCost
from memprof.policies.evict.victims import HEURISTICS
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.planners import graphs

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
