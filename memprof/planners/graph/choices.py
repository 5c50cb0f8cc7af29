"""Schedules that one task was answered with, one after the other: the fastest that fits is kept, the replay decides.

A planner that tries the same schedules whatever the budget is monotone: a larger budget lets in what a smaller one
did, and more. So the planners that use this choose what to try without looking at the budget.
"""

from __future__ import annotations

from memprof.planners.base import ScheduleRequest, ScheduleResult
from memprof.planners.graph.bounds import needed_bytes
from memprof.planners.graph.moves import Moves
from memprof.planners.graph.replay import Replay
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.trace.schema import Ints
from memprof.units import format_bytes


class Choices:
    """The schedules tried for a task.

    Attributes:
        tried: How many were replayed.
        recorded_bytes: Peak of the step as it was recorded.
        least_bytes: Least peak of all.
        is_cut_short: The time was up before all were tried.
    """

    def __init__(self, task: ScheduleRequest) -> None:
        """Begins with the step as it was recorded."""
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
        """Whether the step fits as it is."""
        return self.recorded_bytes <= self._task.budget_bytes

    def met(self) -> ScheduleResult:
        """Answers a budget that the step keeps as it is."""
        return ScheduleResult(
            "optimal",
            f"The step's peak of {format_bytes(self.recorded_bytes)} is within the budget as it is.",
            runs=as_recorded(self._task.graph),
            least_bytes=self.recorded_bytes,
        )

    def is_late(self) -> bool:
        """Tells whether the time is up; what has not been tried by then is left out."""
        self.is_cut_short = self.is_cut_short or self._task.is_late()
        return self.is_cut_short

    def add(self, done: Replay, how: str, moves: Moves | None = None) -> None:
        """Keeps a schedule if it fits and is the fastest so far.

        Of equally fast ones that which moves least is kept, and of those the smallest.

        Args:
            done: The schedule, replayed.
            how: What it is, for the reason: a clause that follows "it ...".
            moves: What leaves for host memory in it.
        """
        self.tried += 1
        self.least_bytes = min(self.least_bytes, done.peak_bytes)
        rank = (round(done.extra_us + done.stall_us, 6), 0 if moves is None else len(moves), done.peak_bytes)
        if done.peak_bytes <= self._task.budget_bytes and (self._best is None or rank < self._best):
            self._best, self._runs, self._moves, self._how = rank, done.runs, moves, how
            self._stall_us = done.stall_us

    def found(self) -> ScheduleResult:
        """Answers with the best of all that were tried."""
        if self._runs is not None:
            return ScheduleResult(
                "time limit" if self.is_cut_short else "found",
                f"Of {self.tried} schedules tried, the fastest that fits {self._how}."
                + (" The time was up before all were tried." if self.is_cut_short else ""),
                runs=self._runs,
                moves=self._moves,
                least_bytes=self.least_bytes,
                stall_us=self._stall_us,
            )
        bound = needed_bytes(self._task.graph)
        if self._task.budget_bytes < bound:
            return ScheduleResult(
                "infeasible",
                f"One operator alone needs {format_bytes(bound)} around it, which no schedule changes; the smallest "
                f"budget this planner has a schedule for is {format_bytes(self.least_bytes)}.",
                least_bytes=self.least_bytes,
            )
        return ScheduleResult(
            "time limit" if self.is_cut_short else "nothing found",
            f"Of {self.tried} schedules tried, the smallest has a peak of {format_bytes(self.least_bytes)}."
            + (" The time was up before all were tried." if self.is_cut_short else ""),
            least_bytes=self.least_bytes,
        )
