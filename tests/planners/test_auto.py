"""The auto planner, and its components."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

import memprof.planners.published.auto as auto_planner
from memprof.planners import base
from memprof.planners.base import Planner, ScheduleRequest, ScheduleResult
from memprof.planners.graph.graph import Graph, graph_of
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.planners.published.auto import Auto, recompute_search
from memprof.planners.published.auto.cuts import CutModel
from memprof.planners.published.auto.improve import Choice, Front, drop_until_fits
from memprof.planners.published.auto.moves import Moves
from memprof.planners.published.auto.recompute_search import RecomputeSearch
from memprof.planners.published.auto.repeats import Repeats, repeats_in
from memprof.planners.published.dtr import Dtr
from memprof.planners.published.knapsack import Knapsack
from memprof.planners.published.selective import Selective
from memprof.planners.published.sqrt import Sqrt
from memprof.trace.store import Trace
from tests.clocks import Clock
from tests.planners import graphs, networks
from tests.planners.every_schedule import least_extra_us

BUILT = {
    "chain": graphs.chain(14),
    "uneven chain": graphs.uneven_chain(10, 3),
    "unet": graphs.unet(2),
    "residual": graphs.residual(3),
    "random": graphs.random_graph(12, 4),
}
SMALL = {
    "chain": graphs.chain(9),
    "uneven chain": graphs.uneven_chain(8, 5),
    "unet": graphs.unet(2),
    "random": graphs.random_graph(8, 4),
}


def peak_of(graph: Graph) -> int:
    return replay(graph, as_recorded(graph)).peak_bytes


def searched(graph: Graph, budget_bytes: int, *, seconds: float = 60.0) -> ScheduleResult:
    return Auto().search(ScheduleRequest(graph, budget_bytes, deadline=time.monotonic() + seconds))


def extra_of(graph: Graph, found: ScheduleResult) -> float:
    return float("inf") if found.runs is None else replay(graph, found.runs).extra_us


@pytest.mark.parametrize("name", ["unet", "residual", "random", "lstm"])
def test_moves_keep_the_bytes_that_a_replay_counts(name: str) -> None:
    """After any moves, the peak and the time kept up to date are those of a replay; undone, all is as before."""
    graph = graph_of(BUILT[name] if name in BUILT else Trace.open("sample_traces/lstm/run.memprof").steady_step())
    state = Repeats(graph)
    moves = Moves(state, random.Random(7))
    assert state.peak_bytes == peak_of(graph)
    for number in range(300):
        before = state.bytes.copy()
        done = moves.step()
        if number % 5 == 0:
            replayed = replay(graph, state.runs())
            assert state.peak_bytes == replayed.peak_bytes
            assert state.extra_us == pytest.approx(replayed.extra_us, abs=1e-6)
            assert repeats_in(graph, state.runs()) == sorted(state.repeats())
        if number % 3 == 0:
            moves.toggle(done)
            assert np.array_equal(state.bytes, before)


def test_the_front_keeps_what_nothing_beats() -> None:
    """A choice that is both larger and slower is not kept, and goes when a better one comes."""
    front = Front()
    front.add(Choice(100, 0.0, ()))
    front.add(Choice(60, 5.0, ()))
    front.add(Choice(70, 6.0, ()))
    assert [choice.peak_bytes for choice in front.choices] == [60, 100]
    front.add(Choice(50, 4.0, ()))
    assert [choice.peak_bytes for choice in front.choices] == [50, 100]
    assert front.least_us(49) == float("inf")
    assert front.least_us(99) == 4.0


def test_the_bound_is_below_every_schedule() -> None:
    """Whatever schedule moves lead to, the model's bound for its peak is no more than its time."""
    for name, step in BUILT.items():
        graph = graph_of(step)
        cuts = list(range(graph.ops // 3, graph.ops, 3))
        model = CutModel(graph, cuts)
        moves = Moves(Repeats(graph), random.Random(1))
        for _ in range(6):
            for _ in range(12):
                moves.step()
            answer = model.solve(moves.state.peak_bytes, whole=False, seconds=10.0)
            assert answer.is_feasible, name
            assert answer.bound_us <= moves.state.extra_us + 1e-6, name


@pytest.mark.parametrize("name", SMALL)
def test_small_steps_are_solved_to_the_optimum(name: str) -> None:
    """On small steps no schedule at all is faster; and none is found where there is none."""
    graph = graph_of(SMALL[name])
    peak = peak_of(graph)
    for percent in (90, 75, 60, 45):
        budget = peak * percent // 100
        found = searched(graph, budget)
        assert extra_of(graph, found) == pytest.approx(least_extra_us(graph, budget))
        if found.runs is not None:
            assert replay(graph, found.runs).peak_bytes <= budget
            assert found.bound_us <= extra_of(graph, found) + 1e-6


def test_a_chain_is_planned_as_chen_does() -> None:
    """Ten equal layers whose backward needs their input: with 7 of 10 values three are dropped and made again once."""
    graph = graph_of(graphs.chain(10))
    peak = peak_of(graph)
    found = searched(graph, peak - 3000)
    assert found.status == "optimal"
    assert extra_of(graph, found) == pytest.approx(3 * 10.0)


@pytest.mark.parametrize(("name", "percent"), [("chain", 60), ("uneven chain", 50), ("unet", 70), ("residual", 60)])
def test_no_single_planner_is_faster(name: str, percent: int) -> None:
    """No schedule of a quick planner within the budget is faster."""
    graph = graph_of(BUILT[name])
    budget = peak_of(graph) * percent // 100
    ours = extra_of(graph, searched(graph, budget))
    single: tuple[Planner, ...] = (Dtr(), Sqrt(), Selective(), Knapsack())
    for planner in single:
        assert ours <= extra_of(graph, planner.search(ScheduleRequest(graph, budget))) + 1e-6, planner.name


def test_the_clock_ends_a_search_with_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """A residual network of 350 operators at 40 % of its peak: a schedule that fits, and no search once time is up.

    The clock is a fake; each part of the search reads it once or twice more when time is up.
    """
    clock = Clock(step_s=0.05, deadline_s=3.0)
    for module in (base, auto_planner, recompute_search):
        monkeypatch.setattr(module, "time", clock)
    graph = graph_of(networks.resnet50())
    budget = peak_of(graph) * 40 // 100
    found = Auto().search(ScheduleRequest(graph, budget, deadline=clock.deadline_s))
    assert found.status == "time limit"
    assert 1 <= clock.late <= 10
    assert found.runs is not None
    assert replay(graph, found.runs).peak_bytes <= budget


def annealed(budget_share: int, moves: int | None, deadline: float) -> Choice:
    """Anneals what dropping one by one finds for a residual network of 350 operators."""
    graph = graph_of(networks.resnet50())
    budget = peak_of(graph) * budget_share // 100
    task = ScheduleRequest(graph, budget, deadline=deadline)
    search = RecomputeSearch(task, moves)
    drop_until_fits(search.moves, search.front, task, budget)
    search.anneal()
    best = search.front.best(budget)
    assert best is not None
    assert best.peak_bytes <= budget
    return best


def test_moves_find_faster_schedules_and_the_same_ones_each_time() -> None:
    """Three thousand moves save more than a tenth of what dropping one by one costs."""
    far = time.monotonic() + 600
    some = annealed(40, 3_000, far)
    assert some.extra_us < 0.9 * annealed(40, 0, far).extra_us
    assert annealed(40, 3_000, far) == some


def test_annealing_ends_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a number of moves it goes on until then, and no longer. The clock is a fake."""
    clock = Clock(step_s=0.01, deadline_s=1.0)
    for module in (base, recompute_search):
        monkeypatch.setattr(module, "time", clock)
    annealed(50, None, clock.deadline_s)
    assert 1 <= clock.late <= 3


@pytest.mark.parametrize(("link", "is_free"), [(1e6, True), (1e-3, False)])
def test_copies_are_used_where_they_cost_less(link: float, is_free: bool) -> None:
    """Over a fast link nothing is repeated and nothing waited for; over a very slow one, no copy is made."""
    graph = graph_of(graphs.chain(14))
    task = ScheduleRequest(graph, peak_of(graph) * 7 // 10, link_bytes_per_us=link)
    found = Auto().search(task)
    assert found.runs is not None
    done = replay(graph, found.runs, found.moves)
    assert done.peak_bytes <= task.budget_bytes
    assert (found.moves is not None) is is_free
    assert (done.extra_us + done.stall_us == 0) is is_free
    assert (found.status == "optimal") is is_free
    assert found.bound_us == 0
