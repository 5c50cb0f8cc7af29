"""The page of `memprof planners`: the predicted peak and time of every planner at every budget."""

from __future__ import annotations

import json
import math

from rich.table import Table
from rich.text import Text

from memprof.analysis.plans.basis import basis_of, link_of
from memprof.analysis.plans.compare_planners import SHARES, Point, compare_planners
from memprof.analysis.plans.plan_json import PLAN_SCHEMA
from memprof.cli.page import Page, cell, make_table
from memprof.cli.progress import PointBar
from memprof.json_values import to_json
from memprof.planners.base import planner_types
from memprof.trace.store import Trace
from memprof.units import format_bytes


def show_comparison(opened: Trace, step_number: int | None, time_limit_s: float, *, is_json: bool) -> None:
    """Runs every planner and prints the table.

    Args:
        opened: The recording.
        step_number: The step; None for the one with the highest peak.
        time_limit_s: Time limit of each search, in seconds.
        is_json: Print JSON instead.
    """
    step = basis_of(opened, step_number).step
    with PointBar(len(SHARES) * len(planner_types())) as bar:
        points = compare_planners(step, time_limit_s=time_limit_s, link_bytes_per_us=link_of(opened), report=bar.add)
    if is_json:
        print(json.dumps({"schema": PLAN_SCHEMA, "points": to_json(points)}, indent=2))
        return
    page = Page.for_stdout()
    budgets = {point.share: point.budget_bytes for point in points}
    peak = max(budgets.values()) / max(budgets)
    page.add(Text(f"Time on top of the recorded step, by planner and budget; recorded peak {format_bytes(int(peak))}."))
    page.add(Text("Per-operator schedules: a lower bound for plans, which choose whole modules.", style="dim"))
    page.add_section("Overhead", _table(points), "* proved optimal; - nothing found; x proved infeasible")
    page.add_section("Planners", _sources())
    page.write()


def _table(points: tuple[Point, ...]) -> Table:
    shares = sorted({point.share for point in points}, reverse=True)
    table = make_table("planner", *(f">{share:.0%}" for share in shares), ">longest search")
    for name in dict.fromkeys(point.planner for point in points):
        own = {point.share: point for point in points if point.planner == name}
        table.add_row(
            cell(name), *(_entry(own[share]) for share in shares), f"{max(p.took_s for p in own.values()):.1f} s"
        )
    bounds = [max(point.bound for point in points if point.share == share) for share in shares]
    table.add_row(cell("bound", "dim"), *(f"{100 * bound:.1f} %" if bound > 0 else "" for bound in bounds), "")
    return table


def _entry(point: Point) -> str:
    if math.isnan(point.overhead):
        return "x" if point.status == "infeasible" else "-"
    return f"{100 * point.overhead:.1f} %" + ("*" if point.status == "optimal" else "")


def _sources() -> Table:
    table = make_table("planner", "method", "source")
    for kind in planner_types():
        table.add_row(cell(kind.name), cell(kind.summary), cell(kind.source))
    return table
