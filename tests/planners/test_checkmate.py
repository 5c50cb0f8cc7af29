"""The exact planner: Checkmate's mixed-integer programme, and a solver that prints nothing."""

from __future__ import annotations

import math
import os
import time

import numpy as np
import pytest
from scipy import optimize

import memprof.planners.published.checkmate as checkmate_planner
from memprof.planners import base
from memprof.planners.base import ScheduleRequest
from memprof.planners.graph import solver
from memprof.planners.graph.graph import Graph, graph_of, needed_bytes
from memprof.planners.graph.schedule import replay, scheduled_step
from memprof.planners.published.checkmate import Checkmate
from memprof.planners.published.checkmate import model as checkmate_model
from memprof.planners.published.checkmate.condensed import blocks_of
from memprof.planners.published.checkmate.model import Model
from tests.clocks import Clock
from tests.planners import graphs
from tests.planners.every_schedule import least_extra_us
from tests.planners.promises import STEPS, cost_us, peak_bytes, step_named


def _small(seed: int) -> Graph:
    """A graph of 3 to 7 forward operators, by turns a chain and one with skips."""
    build = graphs.random_graph if seed % 2 else graphs.uneven_chain
    return graph_of(build(3 + seed % 5, seed))


@pytest.mark.parametrize("seed", range(20))
def test_it_equals_trying_all_schedules(seed: int) -> None:
    """The optimum is that of all schedules, whatever their order, and so is what cannot fit; the bound is below."""
    graph = _small(seed)
    peak, least = peak_bytes(graph), needed_bytes(graph)
    for share in (0.9, 0.5, 0.1):
        budget = int(least + share * (peak - least))
        found = Checkmate().search(ScheduleRequest(graph, budget))
        best = least_extra_us(graph, budget)
        assert cost_us(graph, found) == pytest.approx(best)
        assert found.bound_us <= best + 1e-6
        if found.runs is None:
            assert found.status in ("infeasible", "nothing found")
            assert math.isfinite(least_extra_us(graph, found.least_bytes))
            assert math.isinf(least_extra_us(graph, found.least_bytes - 1))
        else:
            assert found.status == "optimal"


def test_a_node_may_have_to_run_twice_for_one_event() -> None:
    """Here the only schedule that fits goes over an operator twice before one backward operator: it is found."""
    graph = graph_of(graphs.random_graph(7, 109))
    found = Checkmate().search(ScheduleRequest(graph, 16_050))
    assert cost_us(graph, found) == least_extra_us(graph, 16_050) == 224.0


@pytest.mark.parametrize("seed", range(8))
def test_the_relaxation_is_below_every_schedule(seed: int) -> None:
    """The linear bound holds for every schedule, not only for those the programme can write down."""
    graph = _small(seed)
    for percent in (95, 85, 75):
        budget = peak_bytes(graph) * percent // 100
        model = Model(blocks_of(graph), budget, in_forward=True, in_stage=False)
        bound = model.solve(time.monotonic() + 10, is_relaxed=True).bound
        assert bound <= least_extra_us(graph, budget) + 1e-6


@pytest.mark.parametrize("name", STEPS)
def test_it_is_never_over_budget_and_ends_in_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every graph, cut short: the replayed peak is within the budget and the bound below the time.

    The clock is a fake: once time is up, each part reads it at most once more.
    """
    clock = Clock(step_s=0.05, deadline_s=1.0)
    for module in (base, checkmate_planner, checkmate_model):
        monkeypatch.setattr(module, "time", clock)
    step = step_named(name)
    graph = graph_of(step)
    budget = peak_bytes(graph) * 7 // 10
    found = Checkmate().search(ScheduleRequest(graph, budget, deadline=clock.deadline_s))
    assert clock.late <= 10
    if found.runs is None:
        assert found.status in ("infeasible", "nothing found", "time limit")
        return
    done = replay(graph, found.runs)
    assert done.peak_bytes <= budget
    assert found.bound_us <= done.extra_us + 1e-6
    scheduled_step(step, graph, found.runs).check()


def test_operators_in_place_are_one_node_with_their_maker() -> None:
    """Nothing is lost by joining them: a transformer's 90 operators that make values become fewer, exactly."""
    graph = graph_of(step_named("gpt"))
    makers = len(np.unique(graph.value_op))
    blocks = blocks_of(graph)
    assert len(blocks.members) == makers - int((graph.taken_from >= 0).sum())
    assert sorted(op for group in blocks.members for op in group) == np.unique(graph.value_op).tolist()
    joined = blocks_of(graph, 60)
    assert len(joined.members) <= 60
    assert not joined.is_exact


def test_what_the_solver_prints_is_discarded(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line written past Python to the process's output while it solves is nowhere; later lines are."""

    def chatters(*_: object, **__: object) -> str:
        os.write(1, b"HighsMipSolverData says something\n")
        return "solved"

    monkeypatch.setattr(optimize, "milp", chatters)
    assert solver.solve(np.zeros(1), [], (0, 1), np.zeros(1)) == "solved"
    os.write(1, b"the answer\n")
    told = capfd.readouterr()
    assert told.out == "the answer\n"
    assert not told.err
