"""All planners, and their interface: search over the schedules of one graph, a status and a reason."""

from __future__ import annotations

import difflib
import importlib
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from memprof.errors import UsageError
from memprof.planners.graph.graph import Graph
from memprof.planners.graph.moves import Moves
from memprof.trace.schema import Ints

#: How a search ended: proved optimal; found, not proved; proved infeasible; no fitting schedule found; stopped by the
#: deadline with the best so far.
STATUSES = ("optimal", "found", "infeasible", "nothing found", "time limit")
#: Every planner in the order of tables: ``module:class``, imported on first use, or the class itself. One more planner
#: needs a line here and nothing else.
PLANNERS: list[str | type[Planner]] = [
    "memprof.planners.published.sqrt:Sqrt",
    "memprof.planners.published.selective:Selective",
    "memprof.planners.published.bptt:Bptt",
    "memprof.planners.published.chain:Chain",
    "memprof.planners.published.checkmate:Checkmate",
    "memprof.planners.published.dtr:Dtr",
    "memprof.planners.published.knapsack:Knapsack",
    "memprof.planners.published.swap:SwapOut",
    "memprof.planners.published.auto:Auto",
]


@dataclass(frozen=True, eq=False)
class ScheduleRequest:
    """Input of a planner.

    Attributes:
        graph: The step.
        budget_bytes: Most bytes that may be allocated at once.
        deadline: ``time.monotonic`` value at which the search stops and returns its best result.
        link_bytes_per_us: Bandwidth to host memory, for planners that swap as well as recompute; 0 for no link.
    """

    graph: Graph
    budget_bytes: int
    deadline: float = field(default_factory=lambda: time.monotonic() + 60.0)
    link_bytes_per_us: float = 0.0

    def is_late(self) -> bool:
        """Returns whether the deadline has passed."""
        return time.monotonic() >= self.deadline


@dataclass(frozen=True, eq=False)
class ScheduleResult:
    """Result of a planner.

    Attributes:
        status: One of STATUSES.
        reason: One sentence that explains the status.
        runs: The schedule; None where none fits. The caller replays it and ignores the planner's own estimate.
        bound_us: Lower bound on the time any schedule within the budget adds to the step; 0 where unknown.
        least_bytes: Smallest budget for which the planner would find a schedule; 0 where unknown.
        stall_us: Time the device waits for copies, excluding recompute.
        moves: Values the schedule offloads to host memory, to be replayed with it; None for none.
    """

    status: str
    reason: str
    runs: Ints | None = None
    bound_us: float = 0.0
    least_bytes: int = 0
    stall_us: float = 0.0
    moves: Moves | None = None


class Planner(ABC):
    """A published search algorithm.

    Attributes:
        name: Its name on the command line.
        source: Paper and section.
        summary: One sentence on what it does.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def search(self, task: ScheduleRequest) -> ScheduleResult:
        """Searches for the fastest schedule whose peak is within the budget."""


def planner_types() -> tuple[type[Planner], ...]:
    """Returns the planners in the order of tables."""
    return tuple(_imported(one) if isinstance(one, str) else one for one in PLANNERS)


def _imported(place: str) -> type[Planner]:
    module, _, name = place.partition(":")
    kind: type[Planner] = getattr(importlib.import_module(module), name)
    assert issubclass(kind, Planner), f"{place} is not a planner"
    return kind


def named_planner(name: str) -> type[Planner]:
    """Returns the planner with a name.

    Raises:
        UsageError: The name is unknown.
    """
    kind = next((kind for kind in planner_types() if kind.name == name), None)
    if kind is None:
        names = [one.name for one in planner_types()]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"give one of {', '.join(names)}."
        raise UsageError(f"unknown planner {name!r}: {hint}")
    return kind
