"""Exact schedules by mixed-integer programming; a bound and a rounded schedule where time runs out."""

from __future__ import annotations

import math
import time
from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memprof.planners.base import Planner, ScheduleRequest, ScheduleResult
from memprof.planners.graph.graph import Graph, needed_bytes
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.planners.graph.writing import Walk
from memprof.planners.published.checkmate.condensed import Blocks, blocks_of
from memprof.planners.published.checkmate.model import Model, Solution
from memprof.trace.schema import Floats, Ints
from memprof.units import format_bytes

#: Up to this many nodes, the programme also considers recompute before backward begins.
_MOST_NODES_IN_FORWARD = 24

#: Up to this many nodes, a node may run again twice before one event.
_MOST_NODES_TWICE = 10

#: Nodes are joined down to the first number if the step has at most the second. Above the third the programme is not
#: solved, and above the fourth neither is its relaxation: building them alone would take too long.
_MOST_NODES = 70
_MOST_NODES_TO_JOIN = 600
_MOST_NODES_TO_SOLVE = 140
_MOST_NODES_FOR_BOUND = 250

#: Relative tolerance within which two times are equal.
_TOLERANCE = 1e-6

#: Shares of the time left for the bound and for the search for the smallest budget.
_BOUND_SHARE = 0.4
_LEAST_SHARE = 0.25

#: The relaxation is rounded at the budget and at these shares of it, since rounding needs headroom.
_SHARES = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75)

#: Share of the time left for a first programme, restricted to what the relaxations run again.
_FIRST_SHARE = 0.6

#: Below this value, a relaxed rerun variable counts as zero.
_LEAST_DEGREE = 1e-6

#: Thresholds from which a value that is live in the relaxation is kept.
_DEGREES = tuple(np.round(np.arange(0.05, 1.0, 0.05), 2).tolist())


@dataclass(eq=False)
class _Best:
    """The fastest schedule within a budget so far."""

    graph: Graph
    budget_bytes: int
    extra_us: float = math.inf
    runs: Ints | None = None
    least_bytes: int = 2**62

    def offer(self, runs: Ints) -> int:
        """Replays a schedule, keeps it if it is better, and returns its peak."""
        done = replay(self.graph, runs)
        self.least_bytes = min(self.least_bytes, done.peak_bytes)
        if done.peak_bytes <= self.budget_bytes and done.extra_us < self.extra_us:
            self.extra_us, self.runs = done.extra_us, runs
        return done.peak_bytes


class Checkmate(Planner):
    """Solves the mixed-integer programme of a step, as far as time allows.

    First the linear relaxation: a bound for every schedule, and a schedule by rounding. Then the programme itself, on
    steps with few enough nodes for the solver.

    Source: Jain et al. 2020 (Checkmate: breaking the memory wall with optimal tensor rematerialization), sections 4
    (programme) and 5 (two-phase rounding: what is kept is rounded, what must run again follows). We round at several
    thresholds, the paper at one half. Optimal in the paper's sense: before each operator of the step, others run again
    in the step's order, once each; twice each on steps of few nodes, the only case where we saw it matter.
    """

    name: ClassVar[str] = "checkmate"
    source: ClassVar[str] = "Jain et al. 2020 (Checkmate), sections 4 and 5; solved with HiGHS"
    summary: ClassVar[str] = "solves for what is kept and what is recomputed as a mixed-integer programme"

    def search(self, task: ScheduleRequest) -> ScheduleResult:
        """Searches for the fastest schedule within the budget, and for a lower bound on every schedule."""
        graph = task.graph
        best = _Best(graph, task.budget_bytes)
        if best.offer(as_recorded(graph)) <= task.budget_bytes:
            return ScheduleResult("optimal", "The step fits as recorded.", best.runs)
        needed = needed_bytes(graph)
        if needed > task.budget_bytes:
            reason = f"A single operator with its inputs and outputs needs {format_bytes(needed)}."
            return ScheduleResult("infeasible", reason, least_bytes=_least_bytes(task, best))

        blocks = blocks_of(graph)
        bound_us = 0.0
        likely: set[tuple[int, int]] = set()
        if len(blocks.members) <= _MOST_NODES_FOR_BOUND:
            bound_us, likely = _relaxed(task, blocks, best)
            if math.isinf(bound_us):
                reason = "No schedule keeps the inputs and outputs of every operator within the budget."
                return ScheduleResult("infeasible", reason, least_bytes=_least_bytes(task, best))
        if _MOST_NODES < len(blocks.members) <= _MOST_NODES_TO_JOIN:
            blocks = blocks_of(graph, _MOST_NODES)
            likely = _relaxed(task, blocks, best)[1]
        in_forward = len(blocks.members) <= _MOST_NODES_IN_FORWARD
        if likely and not in_forward:
            now = time.monotonic()
            _solved(task, blocks, best, now + _FIRST_SHARE * (task.deadline - now), only=likely)
        answer = Solution(is_proved=False, bound=-math.inf, values=None)
        is_small = len(blocks.members) <= _MOST_NODES_TO_SOLVE
        if is_small and not task.is_late() and best.extra_us > bound_us * (1 + _TOLERANCE):
            answer = _solved(task, blocks, best, task.deadline, in_forward=in_forward)
        is_whole = answer.is_proved and in_forward and blocks.is_exact
        return _found(task, best, answer, bound_us, is_whole=is_whole)


def _relaxed(task: ScheduleRequest, blocks: Blocks, best: _Best) -> tuple[float, set[tuple[int, int]]]:
    """Solves and rounds the linear relaxation, at the budget and at somewhat smaller ones.

    Returns:
        A lower bound on the time, infinity if nothing fits; and the pairs of event and node that the relaxations run
        again.
    """
    now = time.monotonic()
    deadline = now + _BOUND_SHARE * (task.deadline - now)
    bound_us, likely = 0.0, set[tuple[int, int]]()
    for share in _SHARES:
        model = Model(blocks, int(task.budget_bytes * share), in_forward=share == 1.0, in_stage=False)
        answer = model.solve(deadline, is_relaxed=True)
        if share == 1.0:
            bound_us = max(answer.bound, 0.0)
        if answer.values is None:
            break
        again = model.runs_again(answer.values, _LEAST_DEGREE)
        likely |= {(at, node) for at, nodes in enumerate(again) for node in nodes}
        for degree in _DEGREES:
            if time.monotonic() >= deadline:
                return bound_us, likely
            best.offer(_rounded(task.graph, blocks, model, answer.values, degree))
    return bound_us, likely


def _rounded(graph: Graph, blocks: Blocks, model: Model, values: Floats, degree: float) -> Ints:
    """Keeps values whose liveness reaches a threshold, and runs again what that requires."""
    walk = Walk(graph)
    for at, event in enumerate(blocks.events):
        kept = model.kept(values, at, degree)
        for value, originals in enumerate(blocks.originals):
            if value not in kept:
                walk.drop(originals)
        walk.run_to(event.last_op + 1)
    return walk.runs()


def _solved(
    task: ScheduleRequest,
    blocks: Blocks,
    best: _Best,
    deadline: float,
    *,
    in_forward: bool = False,
    only: Set[tuple[int, int]] | None = None,
    least_peak: bool = False,
) -> Solution:
    """Solves one programme; if the solver's tolerance exceeds the budget, again with a budget smaller by that much."""
    budget = task.budget_bytes
    while True:
        model = Model(
            blocks,
            budget,
            in_forward=in_forward,
            in_stage=True,
            rounds=2 if len(blocks.members) <= _MOST_NODES_TWICE else 1,
            only=only,
            least_peak=least_peak,
        )
        answer = model.solve(deadline)
        if answer.values is None:
            return answer
        over = best.offer(_written(task.graph, blocks, model.runs_again(answer.values))) - task.budget_bytes
        if over <= 0 or least_peak or time.monotonic() >= deadline:
            return answer
        budget -= over


def _written(graph: Graph, blocks: Blocks, again: list[list[int]]) -> Ints:
    """Builds the schedule from the operators that run again before each event and the step's own."""
    runs: list[int] = []
    at = 0
    for event, nodes in zip(blocks.events, again, strict=True):
        runs.extend(range(at, event.first_op))
        for node in nodes:
            runs.extend(blocks.members[node])
        runs.extend(range(event.first_op, event.last_op + 1))
        at = event.last_op + 1
    return np.array([*runs, *range(at, graph.ops)], dtype=np.int64)


def _least_bytes(task: ScheduleRequest, best: _Best) -> int:
    """Searches for the smallest budget with a schedule; returns the best one found before the deadline."""
    blocks = blocks_of(task.graph)
    if _MOST_NODES < len(blocks.members) <= _MOST_NODES_TO_JOIN:
        blocks = blocks_of(task.graph, _MOST_NODES)
    if not task.is_late() and len(blocks.members) <= _MOST_NODES_TO_SOLVE:
        now = time.monotonic()
        deadline = now + _LEAST_SHARE * (task.deadline - now)
        in_forward = len(blocks.members) <= _MOST_NODES_IN_FORWARD
        _solved(task, blocks, best, deadline, in_forward=in_forward, least_peak=True)
    return best.least_bytes


def _found(task: ScheduleRequest, best: _Best, answer: Solution, bound_us: float, *, is_whole: bool) -> ScheduleResult:
    """Builds the result with its status and reason."""
    if best.runs is not None:
        if best.extra_us <= bound_us * (1 + _TOLERANCE):
            return ScheduleResult("optimal", "Proved optimal among all schedules.", best.runs, best.extra_us)
        if is_whole:
            reason = "Proved optimal among schedules that recompute in the order of the step."
            return ScheduleResult("optimal", reason, best.runs, best.extra_us)
        if answer.is_proved:
            reason = "Optimal without recompute in forward, with joined operators treated as one."
            return ScheduleResult("found", reason, best.runs, bound_us)
        if task.is_late():
            return ScheduleResult("time limit", "Best schedule at the time limit.", best.runs, bound_us)
        return ScheduleResult("found", "Rounded from the relaxation: too many nodes to solve.", best.runs, bound_us)
    least = _least_bytes(task, best)
    if answer.is_proved:
        reason = "No schedule that recomputes in the order of the step fits."
        return ScheduleResult("nothing found", reason, bound_us=bound_us, least_bytes=least)
    if task.is_late():
        return ScheduleResult(
            "time limit", "The time limit passed before any schedule fitted.", bound_us=bound_us, least_bytes=least
        )
    return ScheduleResult("nothing found", "Too many nodes to solve.", bound_us=bound_us, least_bytes=least)
