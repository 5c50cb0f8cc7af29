"""All planners on one step: overhead against budget, plotted as in the papers on checkpointing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from memprof.json_values import key, or_none
from memprof.planners.base import Planner, ScheduleRequest, planner_types
from memprof.planners.graph.graph import graph_of
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.trace.step import Step

#: Budgets, as shares of the recorded peak.
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True)
class Point:
    """One planner at one budget.

    Attributes:
        planner: Its name.
        share: The budget as a share of the recorded peak.
        budget_bytes: The budget.
        status: How the search ended, one of planners.base.STATUSES.
        reason: One sentence on the status.
        peak_bytes: Replayed peak; 0 where nothing fits.
        overhead: Added time as a share of the recorded step; NaN where nothing fits.
        bound: Lower bound on the overhead of any schedule that fits; 0 where unknown.
        took_s: Duration of the search.
    """

    planner: str
    share: float
    budget_bytes: int
    status: str
    reason: str
    peak_bytes: int = field(metadata=key("peak_allocated_bytes", or_none))
    overhead: float
    bound: float
    took_s: float


def compare_planners(
    step: Step,
    shares: tuple[float, ...] = SHARES,
    *,
    time_limit_s: float = 10.0,
    link_bytes_per_us: float = 0.0,
    planners: Sequence[type[Planner]] | None = None,
    report: Callable[[Point], None] = lambda _: None,
) -> tuple[Point, ...]:
    """Runs every planner at every budget (Jain 2020, figure 5; Kirisame 2021, figure 2).

    Compares schedules of operators, the planners' own output; plans that can be applied to a job choose modules and
    cost more.

    Args:
        step: A recorded step, or one built from arrays.
        shares: The budgets, as shares of the recorded peak.
        time_limit_s: Time limit of each search.
        link_bytes_per_us: Bandwidth to host memory, for the planners that swap: ``swap`` and ``auto``.
        planners: The planners; all of them where left out.
        report: Called with each point.
    """
    graph = graph_of(step)
    peak = replay(graph, as_recorded(graph)).peak_bytes
    points = []
    for kind in planner_types() if planners is None else planners:
        for share in shares:
            started = time.monotonic()
            task = ScheduleRequest(graph, int(peak * share), started + time_limit_s, link_bytes_per_us)
            points.append(_point(kind, task, share, started))
            report(points[-1])
    return tuple(points)


def _point(kind: type[Planner], task: ScheduleRequest, share: float, started: float) -> Point:
    found = kind().search(task)
    whole = task.graph.duration_us or 1.0
    peak, overhead = 0, float("nan")
    if found.runs is not None:
        done = replay(task.graph, found.runs, found.moves)
        peak, overhead = done.peak_bytes, (done.extra_us + done.stall_us) / whole
    return Point(
        planner=kind.name,
        share=share,
        budget_bytes=task.budget_bytes,
        status=found.status,
        reason=found.reason,
        peak_bytes=peak,
        overhead=overhead,
        bound=found.bound_us / whole,
        took_s=time.monotonic() - started,
    )
