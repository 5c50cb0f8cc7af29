"""All planners on one step: overhead against budget, as in the papers on checkpointing, and its tables."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memprof.analysis.table import FIGURE, TEXT, Cell, FactTable, shown
from memprof.json_values import key, or_none
from memprof.planners.base import Planner, ScheduleRequest, planner_types
from memprof.planners.graph.graph import graph_of
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.trace.step import Step
from memprof.units import format_percent

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


#: What the marks in the table of overheads mean.
MARKS = "* proved optimal; - nothing found; x proved infeasible"
PLANNERS = (
    shown("planner", TEXT, lambda kind: kind.name),
    shown("method", TEXT, lambda kind: kind.summary),
    shown("source", TEXT),
)


def planners() -> FactTable:
    """Returns what every planner does, and where it is from."""
    return FactTable(PLANNERS, planner_types())


def overheads(points: tuple[Point, ...]) -> FactTable:
    """Returns each planner's time on top of the recorded step at every budget, and a bound on that of any."""
    shares = sorted({point.share for point in points}, reverse=True)
    by_planner: dict[str, dict[float, Point]] = {}
    for point in points:
        by_planner.setdefault(point.planner, {})[point.share] = point

    def at(share: float) -> Callable[[Any], Cell]:
        return lambda one: _entry(one[1].get(share))

    columns = (
        shown("planner", TEXT, lambda one: one[0]),
        *(shown(f"{share:.0%}", FIGURE, at(share)) for share in shares),
        shown("longest search", FIGURE, lambda one: f"{max(point.took_s for point in one[1].values()):.1f} s"),
    )
    table = FactTable(columns, by_planner.items())
    bounds = {share: max(point.bound for point in points if point.share == share) for share in shares}
    table.add("rest", planner="bound", **{f"{share:.0%}": _share(bound) for share, bound in bounds.items()})
    return table


def _share(bound: float) -> str:
    return format_percent(bound) if bound > 0 else ""


def _entry(point: Point | None) -> Cell:
    if point is None:
        return Cell("")
    if math.isnan(point.overhead):
        return Cell("x" if point.status == "infeasible" else "-", title=point.reason)
    return Cell(f"{format_percent(point.overhead)}{'*' if point.status == 'optimal' else ''}", title=point.reason)
