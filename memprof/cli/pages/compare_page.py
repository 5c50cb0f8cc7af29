"""The page of `memprof suggest --compare-planners`: the predicted peak and time of every planner at every budget."""

from __future__ import annotations

from memprof.analysis.plans.basis import basis_of, link_of
from memprof.analysis.plans.compare_planners import MARKS, SHARES, Point, compare_planners, overheads, planners
from memprof.analysis.plans.plan_json import PLAN_SCHEMA
from memprof.cli.page import Page, show
from memprof.cli.progress import PointBar
from memprof.json_values import to_json
from memprof.planners.base import planner_types
from memprof.trace.store import Trace
from memprof.units import format_bytes


def show_comparison(trace: str, step_number: int | None, rank: int | None, time_limit: float, *, is_json: bool) -> None:
    """Runs every planner and prints the table.

    Args:
        trace: The recording.
        step_number: The step; None for the one with the highest peak.
        rank: The rank; None for the first.
        time_limit: Time limit of each search, in seconds.
        is_json: Print JSON instead.
    """
    opened = Trace.open(trace, rank)
    step = basis_of(opened, step_number).step
    with PointBar(len(SHARES) * len(planner_types())) as bar:
        points = compare_planners(step, time_limit_s=time_limit, link_bytes_per_us=link_of(opened), report=bar.add)
    show(lambda page: _fill(page, points), lambda: {"schema": PLAN_SCHEMA, "points": to_json(points)}, is_json=is_json)


def _fill(page: Page, points: tuple[Point, ...]) -> None:
    budgets = {point.share: point.budget_bytes for point in points}
    peak = max(budgets.values()) / max(budgets)
    page.say(f"Time on top of the recorded step, by planner and budget; recorded peak {format_bytes(int(peak))}.")
    page.say("Per-operator schedules: a lower bound for plans, which choose whole modules.", "dim")
    page.add_section("Overhead", overheads(points), MARKS)
    page.add_section("Planners", planners())
