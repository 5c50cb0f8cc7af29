"""Exact schedules by mixed-integer programming, with a bound and a rounded schedule where there is no time for them."""

from __future__ import annotations

import math
import time
from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memprof.planners.base import Planner, ScheduleRequest, ScheduleResult
from memprof.planners.graph.bounds import needed_bytes
from memprof.planners.graph.graph import Graph
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.planners.graph.walk import Walk
from memprof.planners.published.checkmate.condensed import Blocks, blocks_of
from memprof.planners.published.checkmate.model import Model, Solution
from memprof.trace.schema import Floats, Ints

#: Up to so many nodes, the programme also weighs running operators again before backward begins.
_MOST_NODES_IN_FORWARD = 24

#: Up to so many nodes, it lets a node run again twice before one event.
_MOST_NODES_TWICE = 10

#: Nodes are joined until there are so many, if there are no more than the second to begin with. For more than the
#: third, the programme is left alone, and for more than the fourth its relaxation as well: writing them down alone
#: would take too long.
_MOST_NODES = 70
_MOST_NODES_TO_JOIN = 600
_MOST_NODES_TO_SOLVE = 140
_MOST_NODES_FOR_BOUND = 250

#: Two times are one within this share.
_TOLERANCE = 1e-6

#: Shares of the time left that the bound and the search for the smallest budget may take.
_BOUND_SHARE = 0.4
_LEAST_SHARE = 0.25

#: The relaxation is rounded at the budget and at these shares of it: what is rounded needs room.
_SHARES = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75)

#: Share of the time left that a first programme may take: it weighs only what the relaxations run again.
_FIRST_SHARE = 0.6

#: What a relaxation runs again to less of a degree than this, it does not run again.
_LEAST_DEGREE = 1e-6

#: A relaxed value that is alive to so much of a degree is kept.
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
        """Replays a schedule, takes it if it is better, and returns its peak."""
        done = replay(self.graph, runs)
        self.least_bytes = min(self.least_bytes, done.peak_bytes)
        if done.peak_bytes <= self.budget_bytes and done.extra_us < self.extra_us:
            self.extra_us, self.runs = done.extra_us, runs
        return done.peak_bytes


class Checkmate(Planner):
    """Solves the mixed-integer programme of a step, or as much of it as time allows.

    First the linear relaxation: a bound that holds for every schedule, and a schedule by rounding it. Then the
    programme itself, on a step with so few nodes that the solver has a chance.

    Source: Jain et al. 2020 (Checkmate: breaking the memory wall with optimal tensor rematerialization), sections 4
    (programme) and 5 (two-phase rounding: what is kept is rounded, what must run again follows). We round at several
    thresholds, the paper at one half. Its optimality is the paper's: before each operator of the step, others run
    again in the step's order and once each; twice each on steps of few nodes, which is all that we have seen matter.
    """

    name: ClassVar[str] = "checkmate"
    source: ClassVar[str] = "Jain et al. 2020 (Checkmate), sections 4 and 5; solved with HiGHS"
    summary: ClassVar[str] = "solves what is kept and what runs again as a mixed-integer programme"

    def search(self, task: ScheduleRequest) -> ScheduleResult:
        """Looks for the fastest schedule within the budget, and for a bound below which no schedule comes."""
        graph = task.graph
        best = _Best(graph, task.budget_bytes)
        if best.offer(as_recorded(graph)) <= task.budget_bytes:
            return ScheduleResult("optimal", "The step fits as it was recorded.", best.runs)
        needed = needed_bytes(graph)
        if needed > task.budget_bytes:
            reason = f"One operator with all it reads and makes comes to {needed} bytes."
            return ScheduleResult("infeasible", reason, least_bytes=_least_bytes(task, best))

        blocks = blocks_of(graph)
        bound_us = 0.0
        likely: set[tuple[int, int]] = set()
        if len(blocks.members) <= _MOST_NODES_FOR_BOUND:
            bound_us, likely = _relaxed(task, blocks, best)
            if math.isinf(bound_us):
                reason = "No schedule holds what each operator reads and makes within the budget."
                return ScheduleResult("infeasible", reason, least_bytes=_least_bytes(task, best))
        if _MOST_NODES < len(blocks.members) <= _MOST_NODES_TO_JOIN:
            blocks = blocks_of(graph, _MOST_NODES)
            likely = _relaxed(task, blocks, best)[1]
        in_forward = len(blocks.members) <= _MOST_NODES_IN_FORWARD
        if likely and not in_forward:
            now = time.monotonic()
            _solved(task, blocks, best, now + _FIRST_SHARE * (task.deadline - now), only=likely)
        answer = Solution(is_proved=False, objective=math.inf, bound=-math.inf, values=None)
        is_small = len(blocks.members) <= _MOST_NODES_TO_SOLVE
        if is_small and not task.is_late() and best.extra_us > bound_us * (1 + _TOLERANCE):
            answer = _solved(task, blocks, best, task.deadline, in_forward=in_forward)
        is_whole = answer.is_proved and in_forward and blocks.is_exact
        return _found(task, best, answer, bound_us, is_whole=is_whole)


def _relaxed(task: ScheduleRequest, blocks: Blocks, best: _Best) -> tuple[float, set[tuple[int, int]]]:
    """Solves the linear relaxation and rounds it, and those for somewhat smaller budgets.

    Returns:
        A time below which no schedule comes, infinite if none fits; and the events and the nodes that the relaxations
        run again before them.
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
    """Keeps what is alive to some degree, and runs again what that asks for."""
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
    """Solves one programme; where the solver's tolerance lets it step over the budget, once more with that less."""
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
    """Writes down the operators that run again before each event, and the step's own."""
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
    """Looks for the smallest budget with a schedule; returns that of the best it has when time runs out."""
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
    """Says how the search ended."""
    if best.runs is not None:
        if best.extra_us <= bound_us * (1 + _TOLERANCE):
            return ScheduleResult("optimal", "Proved: no schedule whatever is faster.", best.runs, best.extra_us)
        if is_whole:
            reason = "Proved: no schedule that runs operators again in the order of the step is faster."
            return ScheduleResult("optimal", reason, best.runs, best.extra_us)
        if answer.is_proved:
            reason = "The fastest that runs nothing again in forward and treats joined operators as one."
            return ScheduleResult("found", reason, best.runs, bound_us)
        if task.is_late():
            return ScheduleResult("time limit", "The best when time ran out.", best.runs, bound_us)
        return ScheduleResult("found", "Rounded from the relaxation: too many nodes to solve.", best.runs, bound_us)
    least = _least_bytes(task, best)
    if answer.is_proved:
        reason = "No schedule fits that runs its operators again in the order of the step."
        return ScheduleResult("nothing found", reason, bound_us=bound_us, least_bytes=least)
    if task.is_late():
        return ScheduleResult(
            "time limit", "Time ran out before any schedule fitted.", bound_us=bound_us, least_bytes=least
        )
    return ScheduleResult("nothing found", "Too many nodes to solve.", bound_us=bound_us, least_bytes=least)
