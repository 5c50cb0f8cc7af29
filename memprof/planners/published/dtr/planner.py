"""Dynamic Tensor Rematerialization as a planner: every heuristic of the paper, compared by replay."""

from __future__ import annotations

from typing import ClassVar

from memprof.planners.base import Planner, ScheduleRequest, ScheduleResult
from memprof.planners.graph.bounds import needed_bytes
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.planners.published.dtr.simulation import Simulation
from memprof.policies.evict.heuristics import HEURISTICS
from memprof.trace.schema import Ints
from memprof.units import format_bytes


class Dtr(Planner):
    """Kirisame 2021: simulates every heuristic of the paper and keeps the fastest schedule by replay."""

    name: ClassVar[str] = "dtr"
    source: ClassVar[str] = "Kirisame 2021, Dynamic Tensor Rematerialization, sections 2 and 4.1"
    summary: ClassVar[str] = "runs the step within the budget and evicts what is stale, large and cheap to recompute"
    #: The heuristics to try.
    heuristics: ClassVar[tuple[str, ...]] = tuple(HEURISTICS)

    def search(self, task: ScheduleRequest) -> ScheduleResult:
        """Searches for the fastest schedule whose peak is within the budget."""
        graph, budget = task.graph, task.budget_bytes
        recorded = replay(graph, as_recorded(graph))
        if recorded.peak_bytes <= budget:
            return ScheduleResult("optimal", "The step fits as recorded.", recorded.runs, 0.0, budget)
        needed = needed_bytes(graph)
        if needed > budget:
            reason = f"A single operator with its inputs and outputs needs {format_bytes(needed)}."
            return ScheduleResult(
                "infeasible", reason, least_bytes=self._least_bytes(task, needed, recorded.peak_bytes)
            )
        best, chosen = self._best(task, budget)
        if best is None:
            least = self._least_bytes(task, budget, recorded.peak_bytes)
            status = "time limit" if task.is_late() else "nothing found"
            return ScheduleResult(
                status, "Every heuristic ran out of memory with nothing left to evict.", least_bytes=least
            )
        status = "time limit" if task.is_late() else "found"
        return ScheduleResult(status, f"The {chosen} heuristic was the fastest.", best, least_bytes=budget)

    def _best(self, task: ScheduleRequest, budget_bytes: int) -> tuple[Ints | None, str]:
        """Tries every heuristic; returns the fastest schedule and its heuristic."""
        best: Ints | None = None
        chosen, least_us = "", float("inf")
        for heuristic in self.heuristics:
            runs = Simulation(task, budget_bytes, heuristic).runs()
            if runs is not None and (extra_us := replay(task.graph, runs).extra_us) < least_us:
                best, chosen, least_us = runs, heuristic, extra_us
        return best, chosen

    def _least_bytes(self, task: ScheduleRequest, low: int, high: int) -> int:
        """Bisects the smallest budget that its fastest heuristic can meet; 0 where the deadline passes first."""
        while high - low > high // 200 and not task.is_late():
            middle = (low + high) // 2
            runs = Simulation(task, middle, self.heuristics[0]).runs()
            if runs is None:
                low = middle
            else:
                high = replay(task.graph, runs).peak_bytes
        return 0 if task.is_late() else high
