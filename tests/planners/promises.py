"""Invariants of every planner's results, whatever it searches for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from memprof.planners.base import STATUSES, Planner, ScheduleRequest, ScheduleResult
from memprof.planners.graph.graph import Graph, graph_of, needed_bytes
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.planners import graphs

_SAMPLES = Path(__file__).parents[2] / "sample_traces"

#: Budgets that planners are asked for, as shares of the recorded peak.
SHARES = (1.0, 0.9, 0.7, 0.5, 0.3)

_BUILDERS = {
    "chain": lambda: graphs.chain(30),
    "uneven chain": lambda: graphs.uneven_chain(25, seed=3),
    "unet": lambda: graphs.unet(4),
    "residual": lambda: graphs.residual(5),
    "random": lambda: graphs.random_graph(30, seed=11),
}
STEPS = ("gpt", "lstm", *_BUILDERS)


@cache
def step_named(name: str) -> Step:
    """Returns the step of a sample trace, or of a builder of graphs."""
    if name in _BUILDERS:
        return _BUILDERS[name]()
    return Trace.open(_SAMPLES / name / "run.memprof").steady_step()


def peak_bytes(graph: Graph) -> int:
    """Returns the peak of a step as it was recorded."""
    return replay(graph, as_recorded(graph)).peak_bytes


def cost_us(graph: Graph, found: ScheduleResult) -> float:
    """Returns the time that an answer adds to the step; infinite where there is none."""
    if found.runs is None:
        return float("inf")
    done = replay(graph, found.runs, found.moves)
    return done.extra_us + done.stall_us


def check_answers(planner: Planner, step: Step, shares: tuple[float, ...] = SHARES, *, link: float = 0.0) -> None:
    """Plans for budgets from the largest to the smallest, and checks every result.

    A schedule is within the budget when replayed, a budget that the step meets costs nothing, a larger budget is never
    slower, only infeasible budgets are called infeasible, and the smallest budget that a result names is sufficient.
    """
    graph = graph_of(step)
    peak = peak_bytes(graph)
    before = 0.0
    for share in sorted(shares, reverse=True):
        budget = int(peak * share)
        found = planner.search(ScheduleRequest(graph, budget, link_bytes_per_us=link))
        assert found.status in STATUSES
        assert found.reason.endswith(".")
        cost = cost_us(graph, found)
        assert cost >= before - 1e-6, f"at {share} of the peak {type(planner).__name__} is faster than above"
        before = cost
        if found.runs is not None:
            done = replay(graph, found.runs, found.moves)
            assert found.status in ("optimal", "found")
            assert done.peak_bytes <= budget
            assert abs(found.stall_us - done.stall_us) < 1e-6
        else:
            assert found.status in ("infeasible", "nothing found")
            assert (found.status == "infeasible") <= (budget < needed_bytes(graph))
            assert found.least_bytes > budget
            again = planner.search(ScheduleRequest(graph, found.least_bytes, link_bytes_per_us=link))
            assert again.runs is not None
        if budget >= peak:
            assert (found.status, cost) == ("optimal", 0.0)


#: Steps on which every planner of the registry is held to its promises: small, so that exact planners answer in time.
SMALL = {
    "chain": lambda: graphs.chain(6),
    "unet": lambda: graphs.unet(2),
    "residual": lambda: graphs.residual(2),
    "random": lambda: graphs.random_graph(12, seed=5),
}


def check_planner(kind: type[Planner], name: str) -> None:
    """Checks what a planner says of itself, and its answers on a small step, with a link to host memory and without."""
    assert kind.name.isidentifier()
    assert kind.source
    assert kind.summary
    for link in (0.0, 1.0):
        check_answers(kind(), SMALL[name](), (1.0, 0.8, 0.6, 0.4), link=link)
