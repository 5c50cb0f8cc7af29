"""The schedules tried for one request; the fastest that fits, by replay, is kept.

A planner that tries the same schedules whatever the budget is monotone: a larger budget admits every schedule a smaller
one does. The planners that use this class therefore choose what to try without reading the budget.
"""

from __future__ import annotations

from memprof.planners.base import ScheduleRequest, ScheduleResult
from memprof.planners.graph.graph import needed_bytes
from memprof.planners.graph.moves import Moves, Replay
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.trace.schema import Ints
from memprof.units import format_bytes


class Choices:
    """The schedules tried for a request.

    Attributes:
        tried: Number of schedules replayed.
        recorded_bytes: Peak of the recorded step.
        least_bytes: Smallest peak of all.
        is_cut_short: Whether the deadline passed before all were tried.
    """

    def __init__(self, task: ScheduleRequest) -> None:
        self._task = task
        self._best: tuple[float, int, int] | None = None
        self._runs: Ints | None = None
        self._moves: Moves | None = None
        self._stall_us = 0.0
        self._how = ""
        self.tried = 0
        self.is_cut_short = False
        self.least_bytes = self.recorded_bytes = replay(task.graph, as_recorded(task.graph)).peak_bytes

    @property
    def is_met(self) -> bool:
        """Whether the recorded step fits."""
        return self.recorded_bytes <= self._task.budget_bytes

    def met(self) -> ScheduleResult:
        """Returns the result for a budget that the recorded step meets."""
        return ScheduleResult(
            "optimal",
            f"The step's peak of {format_bytes(self.recorded_bytes)} is within the budget.",
            runs=as_recorded(self._task.graph),
            least_bytes=self.recorded_bytes,
        )

    def is_late(self) -> bool:
        """Returns whether the deadline has passed; schedules not tried by then are left out."""
        self.is_cut_short = self.is_cut_short or self._task.is_late()
        return self.is_cut_short

    def add(self, done: Replay, how: str, moves: Moves | None = None) -> None:
        """Keeps a schedule if it fits and is the fastest so far.

        Among equally fast ones the one that moves least is kept, and then the smallest.

        Args:
            done: The schedule, replayed.
            how: Description for the reason: a clause that follows "it ...".
            moves: Values it offloads to host memory.
        """
        self.tried += 1
        self.least_bytes = min(self.least_bytes, done.peak_bytes)
        rank = (round(done.extra_us + done.stall_us, 6), 0 if moves is None else len(moves), done.peak_bytes)
        if done.peak_bytes <= self._task.budget_bytes and (self._best is None or rank < self._best):
            self._best, self._runs, self._moves, self._how = rank, done.runs, moves, how
            self._stall_us = done.stall_us

    def found(self) -> ScheduleResult:
        """Returns the best of all that were tried."""
        if self._runs is not None:
            return ScheduleResult(
                "time limit" if self.is_cut_short else "found",
                f"Fastest of {self.tried} schedules tried that fits: it {self._how}."
                + (" Stopped by the time limit before all were tried." if self.is_cut_short else ""),
                runs=self._runs,
                moves=self._moves,
                least_bytes=self.least_bytes,
                stall_us=self._stall_us,
            )
        bound = needed_bytes(self._task.graph)
        if self._task.budget_bytes < bound:
            return ScheduleResult(
                "infeasible",
                f"A single operator needs {format_bytes(bound)} under any schedule; the smallest budget this planner "
                f"has a schedule for is {format_bytes(self.least_bytes)}.",
                least_bytes=self.least_bytes,
            )
        return ScheduleResult(
            "time limit" if self.is_cut_short else "nothing found",
            f"None of {self.tried} schedules tried fits; the lowest peak is {format_bytes(self.least_bytes)}."
            + (" Stopped by the time limit before all were tried." if self.is_cut_short else ""),
            least_bytes=self.least_bytes,
        )
