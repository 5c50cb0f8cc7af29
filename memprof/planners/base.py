"""What every planner is: a search over schedules of one graph, that says how it ended and why."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from memprof.planners.graph.graph import Graph
from memprof.planners.graph.moves import Moves
from memprof.trace.schema import Ints

#: How a search ended: proved to be the fastest; found, not proved; nothing fits and that is proved; nothing that fits
#: was found; stopped by the clock with the best so far.
STATUSES = ("optimal", "found", "infeasible", "nothing found", "time limit")


@dataclass(frozen=True, eq=False)
class ScheduleRequest:
    """What a planner is asked.

    Attributes:
        graph: The step.
        budget_bytes: Most bytes that may be allocated at once.
        deadline: Moment of ``time.monotonic`` at which the search ends with the best it has.
        link_bytes_per_us: Bandwidth to host memory, for planners that move what others make again; 0 where there is
            none.
    """

    graph: Graph
    budget_bytes: int
    deadline: float = field(default_factory=lambda: time.monotonic() + 60.0)
    link_bytes_per_us: float = 0.0

    def is_late(self) -> bool:
        """Tells whether the time is up."""
        return time.monotonic() >= self.deadline


@dataclass(frozen=True, eq=False)
class ScheduleResult:
    """What a planner answers.

    Attributes:
        status: One of STATUSES.
        reason: One sentence on how it came to that.
        runs: The schedule; None where none fits. Whoever reads it replays it: the planner's own belief counts nothing.
        bound_us: No schedule within the budget takes less time on top of the step than this; 0 where unknown.
        least_bytes: Smallest budget for which it would find a schedule; 0 where unknown.
        stall_us: Time in which the device waits for copies, on top of what runs again.
        moves: What leaves for host memory in the schedule, to be replayed with it; None where nothing does.
    """

    status: str
    reason: str
    runs: Ints | None = None
    bound_us: float = 0.0
    least_bytes: int = 0
    stall_us: float = 0.0
    moves: Moves | None = None


class Planner(ABC):
    """One published way to search.

    Attributes:
        name: What it is called on the command line.
        source: The paper and the section.
        summary: One sentence on what it does.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def search(self, task: ScheduleRequest) -> ScheduleResult:
        """Looks for the schedule with the least time whose peak is within the budget."""
