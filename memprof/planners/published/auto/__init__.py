"""memprof's own search: greedy, then a growing exact model, then local search, with a bound on the remaining gap."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import ClassVar

from memprof.planners.base import Planner, ScheduleRequest, ScheduleResult
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.planners.published.auto.recompute_search import RecomputeSearch
from memprof.planners.published.swap import SwapOut

#: Share of the time in which schedules with copies are searched, and of the step's time what counts as no time.
_COPIES_SHARE, _NOTHING = 0.3, 1e-9


class Auto(Planner):
    """Feasibility first, then greedy heuristics, then an exact model that grows where it is wrong, then annealing.

    The model (see ``cuts``) bounds how far a schedule can be from the optimum; annealing (see ``improve``) searches
    what it leaves open. Every schedule that any part finds is replayed and kept unless it is dominated.
    """

    name: ClassVar[str] = "auto"
    source: ClassVar[str] = (
        "Jain 2020, Checkmate, section 4, on stages merged between cuts; Kirisame 2021, Dynamic Tensor "
        "Rematerialization, section 4.1; Kirkpatrick 1983, Optimization by Simulated Annealing"
    )
    summary: ClassVar[str] = (
        "tries every fast planner, then improves the best schedule for as long as there is time and bounds its gap to "
        "the optimum; offloads values where the link's bandwidth is given"
    )
    #: Moves drawn once every part has run; None for as many as there is time for.
    most_moves: int | None = None

    def search(self, task: ScheduleRequest) -> ScheduleResult:
        """Searches for the fastest schedule whose peak is within the budget."""
        graph, budget = task.graph, task.budget_bytes
        recorded = replay(graph, as_recorded(graph))
        if recorded.peak_bytes <= budget:
            return ScheduleResult("optimal", "The step fits as recorded.", recorded.runs, 0.0, budget)
        if task.link_bytes_per_us <= 0:
            return RecomputeSearch(task, self.most_moves).found()
        return self._with_copies(task)

    def _with_copies(self, task: ScheduleRequest) -> ScheduleResult:
        """Returns the faster of a schedule with copies to host memory and one without."""
        now = time.monotonic()
        moved = SwapOut().search(replace(task, deadline=now + _COPIES_SHARE * max(0.0, task.deadline - now)))
        moved_us = _added_us(task, moved)
        if moved_us <= _NOTHING * task.graph.duration_us:
            reason = f"{moved.reason} Proved optimal: it adds no time."
            return replace(moved, status="optimal", reason=reason, bound_us=0.0)
        found = RecomputeSearch(task, self.most_moves).found()
        if moved_us < _added_us(task, found):
            return replace(moved, bound_us=0.0)
        if found.runs is None:
            return replace(found, status="nothing found", reason="No fitting schedule found, with copies or without.")
        # What is proved of schedules without copies does not hold for those with them.
        status = "time limit" if task.is_late() else "found"
        reason = f"Faster than the schedules with copies. Without copies: {found.reason}"
        return replace(found, status=status, reason=reason, bound_us=0.0)


def _added_us(task: ScheduleRequest, found: ScheduleResult) -> float:
    if found.runs is None:
        return float("inf")
    done = replay(task.graph, found.runs, found.moves)
    return done.extra_us + done.stall_us
