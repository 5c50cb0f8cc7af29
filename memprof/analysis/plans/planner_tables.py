"""The tables of all planners on one step: their overhead at every budget, and what each does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from memprof.analysis.plans.compare_planners import Point
from memprof.analysis.table import FIGURE, TEXT, Cell, FactTable, shown
from memprof.planners.base import planner_types
from memprof.units import format_percent

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
