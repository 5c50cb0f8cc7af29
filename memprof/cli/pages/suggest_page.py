"""The pages of `memprof suggest`: the plans found, and with --compare-planners every planner at every budget."""

from __future__ import annotations

import math
from pathlib import Path

from rich.text import Text

from memprof.analysis.plans.basis import basis_of, link_of
from memprof.analysis.plans.compare_planners import MARKS, SHARES, Point, compare_planners, overheads, planners
from memprof.analysis.plans.dry_check_results import CHECKED, Checked
from memprof.analysis.plans.plan_json import PLAN_SCHEMA
from memprof.analysis.plans.plan_rows import plan_tables, rows_of_search, shortest_refused
from memprof.analysis.plans.suggest import Suggestion, describe_peak
from memprof.analysis.plans.suggest_words import (
    caveats,
    describe_recorded,
    describe_reserved,
    describe_simplest,
    verdict,
)
from memprof.analysis.table import FactTable
from memprof.cli.page import Page, show
from memprof.cli.pages.drawings import draw_front
from memprof.cli.pages.next_commands import next_commands
from memprof.cli.pages.plan_page import fill_basis
from memprof.cli.progress import PointBar
from memprof.json_values import to_json
from memprof.planners.base import planner_types
from memprof.trace.store import Trace
from memprof.units import format_bytes


def fill_suggestion(
    page: Page, found: Suggestion, written: Path | None, checked: tuple[Checked, ...] | None = None
) -> None:
    """Adds the result of a search to a page."""
    answer = found.answer
    page.say(verdict(found, checked or ()), "bold")
    if simplest := describe_simplest(found):
        page.say(simplest)
    page.warn(*caveats(found))
    page.say(describe_recorded(found), "dim")
    fill_basis(page, found.basis)
    if answer.best is not None and not answer.best.policies:
        return
    if answer.schedule is not None:
        page.say(_schedule(found), "dim")
    if more := describe_reserved(found):
        page.warn(more)
    if page.is_terminal:
        page.add("")
        for line in _front(found, page.width):
            page.add(line)
    fits, *others = plan_tables(*rows_of_search(found), shortest_refused(found))
    for table in (fits, ("Dry runs", FactTable(CHECKED, checked or ()), "the plans as applied, in order"), *others):
        page.add_section(*table)
    if answer.best is not None:
        page.add("")
        least = found.short(answer.least.plan.describe())
        page.say(f"lowest peak found: {describe_peak(answer.least)} with {least}", "dim")
    page.add_next(*next_commands(found, written, checked))


def _front(found: Suggestion, width: int) -> list[Text]:
    """Returns the plans of the page by peak and step time, drawn; nothing where step times are unknown."""
    recorded = found.answer.recorded
    if not recorded.step_time_us or not math.isfinite(recorded.step_time_us):
        return []
    plans = [one for one in (*found.plans, *found.others) if math.isfinite(one.step_time_us)]
    points = [(one.peak_bytes, one.step_time_us / recorded.step_time_us - 1) for one in (recorded, *plans)]
    return draw_front(points, found.answer.search_request.budget_bytes, width)


def _schedule(found: Suggestion) -> str:
    """Returns a planner's per-operator schedule, compared with what can be applied."""
    made = found.answer.schedule
    assert made is not None
    if not made.peak_bytes:
        return f"{made.planner}: {made.status}. {made.reason}"
    change = made.step_time_us / found.answer.recorded.step_time_us - 1 if found.answer.recorded.step_time_us else 0.0
    return (
        f"{made.planner}, recomputing single operators: peak {format_bytes(made.peak_bytes)}, step time "
        f"{100 * change:+.1f} % ({made.status}). {made.reason} Plans choose the modules it recomputes."
    )


def show_comparison(trace: str, step_number: int | None, rank: int | None, time_limit: float, *, is_json: bool) -> None:
    """Runs every planner and prints the table."""
    opened = Trace.open(trace, rank)
    step = basis_of(opened, step_number).step
    with PointBar(len(SHARES) * len(planner_types())) as bar:
        points = compare_planners(step, time_limit_s=time_limit, link_bytes_per_us=link_of(opened), report=bar.add)
    show(
        lambda page: _fill_comparison(page, points),
        lambda: {"schema": PLAN_SCHEMA, "points": to_json(points)},
        is_json=is_json,
    )


def _fill_comparison(page: Page, points: tuple[Point, ...]) -> None:
    budgets = {point.share: point.budget_bytes for point in points}
    peak = max(budgets.values()) / max(budgets)
    page.say(f"Time on top of the recorded step, by planner and budget; recorded peak {format_bytes(int(peak))}.")
    page.say("Per-operator schedules: a lower bound for plans, which choose whole modules.", "dim")
    page.add_section("Overhead", overheads(points), MARKS)
    page.add_section("Planners", planners())
