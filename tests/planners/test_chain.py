"""The planner for chains of stages: rotor's dynamic programme."""

from __future__ import annotations

import random
import time

import pytest

from memprof.planners.base import ScheduleRequest
from memprof.planners.graph.graph import Graph, graph_of
from memprof.planners.graph.schedule import replay
from memprof.planners.graph.stages import lines_of
from memprof.planners.published.chain import Chain
from memprof.planners.published.chain.options import stage_costs
from memprof.planners.published.chain.table import Table, grid_of
from tests.planners import graphs
from tests.planners.every_schedule import least_extra_us
from tests.planners.promises import cost_us, peak_bytes


def _input_chain(seed: int, layers: int) -> Graph:
    """Layers of random sizes whose backward needs their input and not their output: rotor's own setting."""
    draw = random.Random(seed)
    step = graphs.mirrored(
        [[op_id - 1] if op_id else [] for op_id in range(layers)],
        [draw.randint(1, 9) * 100 for _ in range(layers)],
        [float(draw.randint(1, 20)) for _ in range(layers)],
        workspace_bytes=[draw.randint(0, 5) * 100 for _ in range(layers)],
    )
    return graph_of(step)


@pytest.mark.parametrize("seed", range(12))
def test_on_chains_it_equals_trying_all_schedules(seed: int) -> None:
    """Where every layer needs its input in backward, no schedule that holds what it keeps is faster in the budget.

    This is rotor's optimality; schedules that drop something they kept can be faster.
    """
    graph = _input_chain(seed, 3 + seed % 5)
    peak = peak_bytes(graph)
    for percent in (95, 85, 75, 65, 55, 45):
        budget = peak * percent // 100
        found = Chain().search(ScheduleRequest(graph, budget))
        assert cost_us(graph, found) == least_extra_us(graph, budget, is_persistent=True)


@pytest.mark.parametrize("seed", range(6))
def test_it_never_claims_more_than_there_is(seed: int) -> None:
    """Where layers need their outputs too, it is never faster than the best of all schedules."""
    graph = graph_of(graphs.uneven_chain(6, seed))
    for percent in (90, 75, 60):
        budget = peak_bytes(graph) * percent // 100
        assert cost_us(graph, Chain().search(ScheduleRequest(graph, budget))) >= least_extra_us(graph, budget)


def test_four_layers_by_hand() -> None:
    """Of four layers of 1000 bytes and 10 us, recorded with 4000 bytes at the peak, only the first is recomputed.

    Its output is dropped once the second layer has read it. Every backward then needs three times 1000 bytes: its
    input, its result, and the incoming gradient or another input.
    """
    graph = graph_of(graphs.chain(4))
    assert peak_bytes(graph) == 4000
    found = Chain().search(ScheduleRequest(graph, 3999))
    assert cost_us(graph, found) == 10.0
    assert found.runs is not None
    assert replay(graph, found.runs).peak_bytes == 3000


def test_identical_layers_are_solved_once() -> None:
    """A chain of 40 equal layers has as many different windows as lengths and ends, not as pairs of stages."""
    graph = graph_of(graphs.chain(40))
    (line,) = lines_of(graph)
    costs = stage_costs(graph, line)
    table = Table(line, costs, grid_of(line, costs, peak_bytes(graph)), lambda: False)
    assert len(line.stages) == 40
    assert len({id(cost) for cost in costs}) <= 4
    assert table.windows < 40 * 41 / 2 / 4


def test_time_up_at_once_is_said() -> None:
    """Without time it returns nothing, with a reason."""
    graph = graph_of(graphs.chain(30))
    found = Chain().search(ScheduleRequest(graph, peak_bytes(graph) // 2, deadline=time.monotonic() - 1))
    assert found.status == "time limit"
    assert found.runs is None
