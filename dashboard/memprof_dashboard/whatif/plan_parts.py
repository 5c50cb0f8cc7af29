"""Tables and texts of the what-if page: search results, one plan, and the planner comparison."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from dash import dcc, html

from memprof.analysis.plans.compare_planners import MARKS, Point, overheads, planners
from memprof.analysis.plans.plan_json import describe_error
from memprof.analysis.plans.plan_rows import PlanRow, plan_tables, rows_of_search, shortest_refused
from memprof.analysis.plans.predict import commands_under
from memprof.analysis.plans.suggest import Suggestion, describe_peak, place_of
from memprof.analysis.plans.suggest_words import (
    caveats,
    describe_recorded,
    describe_reserved,
    describe_simplest,
    describe_slowdown,
    verdict,
)
from memprof.analysis.plans.verify import describe_short
from memprof.analysis.snapshot_plans import snapshot_words
from memprof.analysis.snapshot_plans.change import SnapshotPlans
from memprof.analysis.table import BYTES, FIGURE, NAMES, TEXT, WORDS, FactTable, shown
from memprof.policies.plan.plan_tables import NUMERICS_IN_WORDS
from memprof.units import format_bytes, format_bytes_change, format_us
from memprof_dashboard import parts
from memprof_dashboard.figures.overlay import Curve, overlay
from memprof_dashboard.figures.shared import CONFIG, message
from memprof_dashboard.figures.whatif import Measured, Plans, is_on_front, pareto
from memprof_dashboard.page import theme_of
from memprof_dashboard.whatif.planning import Detail, Run, plans_of
from memprof_dashboard.whatif.workspace import CHOSEN, DETAIL, PARETO, ROW, SAVE, STEP, PlanSearch

#: Kinds of plans listed at most.
_MOST_ROWS = 20
_PLOT = {"height": "420px"}


def summary(found: Suggestion) -> list[Any]:
    """Returns the verdict and its caveats."""
    answer = found.answer
    lowest = f"lowest peak found: {describe_peak(answer.least)} with {found.short(answer.least.plan.describe())}"
    warnings = [*caveats(found), describe_reserved(found)]
    simplest: list[Any] = []
    if found.simplest:
        place = next(at for at, one in enumerate(plans_of(found)) if one is found.plans[found.simplest - 1])
        chosen: Any = {"type": ROW, "plan": str(place)}  # text: its row in the table has the number
        simplest = [html.P([f"{describe_simplest(found)}. ", html.Button("Choose it", id=chosen, type="button")])]
    return [
        html.P(parts.sentence(verdict(found), 1000), className="verdict"),
        *simplest,
        html.P(parts.sentence(f"{describe_recorded(found)}; {lowest}.", 700), className="note"),
        *(html.P(warning, className="warning") for warning in warnings if warning),
    ]


def result_tables(found: Suggestion) -> list[Any]:
    """Returns the tables of a search that have rows: plans that fit, plans over budget, and what is not possible."""
    places = {id(one): place for place, one in enumerate(plans_of(found))}
    fitting, others = rows_of_search(found)
    # The job as it is has no step of its own to show.
    listed = [row for row in fitting if row.policies]
    tables = plan_tables(listed, others, shortest_refused(found), most=_MOST_ROWS)

    def choose(row: PlanRow) -> Any:
        button: Any = {"type": ROW, "plan": places[id(row.found)]}
        return html.Button(parts.name(row.short, 160), id=button, type="button", className="words")

    return _drawn(tables, short=choose)


def changes(found: SnapshotPlans) -> list[Any]:
    """Returns the result of a search on an imported snapshot: verdict, caveats and tables."""
    return [
        html.P(parts.sentence(snapshot_words.verdict(found), 1000), className="verdict"),
        html.P(parts.sentence("; ".join(snapshot_words.describe_recorded(found)), 700), className="note"),
        *(html.P(warning, className="warning") for warning in snapshot_words.caveats(found)),
        *_drawn(snapshot_words.tables(found)),
        html.P(snapshot_words.NEEDS, className="note"),
    ]


def _drawn(tables: list[tuple[str, FactTable, str]], **drawn: Any) -> list[Any]:
    return [
        html.Div([html.H3(title), remark and parts.note(remark), parts.facts(table, label=title.lower(), drawn=drawn)])
        for title, table, remark in tables
        if table
    ]


def tried_table(found: Suggestion, on_front: list[bool]) -> Any:
    """Returns the table of what the plot of plans shows."""
    most = 100
    plans = plans_of(found)
    rows: list[list[Any]] = [
        [
            parts.name(one.plan.describe()),
            f"{one.peak_bytes:,}",
            f"{one.step_time_us:,.0f}",
            "yes" if front else "",
        ]
        for one, front in list(zip(plans, on_front, strict=True))[:most]
    ]
    if len(plans) > most:
        rows.append([f"{len(plans) - most:,} more not listed", "", "", ""])
    heads = ["plan", ">peak, bytes", ">step time, us", "Pareto-optimal"]
    return parts.as_table(heads, rows, label="all plans tried")


def plan_facts(detail: Detail, at: int, found: Suggestion) -> list[Any]:
    """Returns a plan's effects, policy by policy, its prediction, and how to run under it, by its place."""
    one = plans_of(found)[at]
    over = found.answer.search_request.needed(one) - found.answer.search_request.budget_bytes
    fits = f"{format_bytes(-over)} below budget" if over <= 0 else f"{format_bytes(over)} over budget"
    within = "" if one.interval.is_exact else f" ({describe_peak(one)} with the errors of other jobs)"
    summary = (
        f"peak in {place_of(one)}{within}, {fits}; step time {format_us(one.step_time_us)} "
        f"({describe_slowdown(one, found)}). Estimate: {found.source_of(one)}; {NUMERICS_IN_WORDS[one.numerics]}."
    )
    return [
        html.H3(parts.name(found.short(one.plan.describe()), 300)),
        html.P([html.Strong(format_bytes(one.peak_bytes)), " ", parts.sentence(summary, 500)]),
        parts.facts(detail.policies, label="plan, policy by policy"),
        *command_of(SAVE, commands_under(found.manifest, "plan.toml")),
    ]


def place_in(found: Suggestion, chosen: Any) -> int:
    """Returns a plan's place as a browser sent it; -1 where it makes no sense."""
    return chosen if type(chosen) is int and 0 <= chosen < len(plans_of(found)) else -1


def result(search: PlanSearch, found: Suggestion, *, is_old: bool) -> list[Any]:
    """Returns the result of a search: verdict, plot, the chosen plan and the tables."""
    plans = plans_of(found)
    remarks = (
        [parts.note("The recording has grown since this search; search again to include the new data.")]
        if is_old
        else []
    )
    if not plans:
        return [*summary(found), *remarks]
    best = found.answer.best
    first = found.answer.least if best is None else best
    chosen = next((place for place, one in enumerate(plans) if one is first), 0)
    cloud = _cloud(found)
    on_front = is_on_front(cloud.peak_bytes, cloud.relative_time).tolist()
    return [
        dcc.Store(id=CHOSEN, data=chosen),
        *summary(found),
        *remarks,
        html.Div(
            [
                html.Div(
                    [
                        html.H3("Plans tried"),
                        dcc.Graph(id=PARETO, config=CONFIG, responsive=True, style=_PLOT),
                        tried_table(found, on_front),
                    ]
                ),
                html.Div(
                    [
                        html.Div(id=DETAIL),
                        parts.graph(STEP, "300px"),
                    ],
                    className="plan",
                ),
            ],
            className="halves even",
        ),
        *result_tables(found),
    ]


def _cloud(found: Suggestion) -> Plans:
    plans = plans_of(found)
    recorded = found.answer.recorded.step_time_us or math.nan
    return Plans(
        peak_bytes=np.array([one.peak_bytes for one in plans], dtype=np.int64),
        relative_time=np.array([one.step_time_us / recorded for one in plans], dtype=np.float64),
        names=[one.plan.describe() for one in plans],
    )


def front(found: Suggestion, runs: tuple[Run, ...], chosen: int, theme: Any) -> Any:
    """Draws the plans by peak and step time, with runs under plans; arguments as for ``pareto``."""
    recorded = found.answer.recorded
    if not recorded.step_time_us or not math.isfinite(recorded.step_time_us):
        return message("The recorded step time is unknown, so step times of plans have no reference.", theme_of(theme))
    measured = [
        Measured(
            run.name,
            run.found.measured.peak_allocated_bytes,
            run.found.measured.step_time_us / recorded.step_time_us,
        )
        for run in runs
        if run.found is not None and math.isfinite(run.found.measured.step_time_us)
    ]
    budget = found.answer.search_request.budget_bytes
    return pareto(_cloud(found), recorded.peak_bytes, budget, theme_of(theme), chosen=chosen, measured=measured)


def step_figure(detail: Detail, found: Suggestion, theme: Any) -> Any:
    """Draws a plan's step over the recorded one."""
    return overlay(
        Curve("recorded", detail.recorded, detail.recorded_phases),
        Curve("with the plan", detail.predicted, detail.predicted_phases),
        theme_of(theme),
        budget_bytes=found.answer.search_request.budget_bytes,
    )


def command_of(save: str, commands: list[str]) -> list[Any]:
    """Returns how to run under a plan: a button that saves the plan and copies the first command, and the commands.

    Args:
        save: Id of the button, whose clicks download the plan.
        commands: The commands.
    """
    copied: Any = {"data-copy": commands[0]}
    how = "Dry-run the job under the plan, then train" if len(commands) > 1 else "Run the job under the plan"
    return [
        html.P(f"{how} to verify the prediction:", className="note"),
        html.Div(
            [
                html.Button(
                    "Save plan.toml, copy command",
                    id=save,
                    type="button",
                    title="downloads the plan; the command expects it where it runs",
                    **copied,
                ),
                *map(parts.command, commands),
            ],
            className="command",
        ),
    ]


def _error(run: Run) -> str:
    if run.found is None or not run.found.peak_error_bytes:
        return "" if run.found is None else "exact"
    share = describe_error(run.found.predicted.peak_allocated_bytes, run.found.measured.peak_allocated_bytes)
    return f"{format_bytes_change(run.found.peak_error_bytes)}{share and f' ({share})'}"


#: Recordings that were made under a plan.
_RUNS = (
    shown("run", TEXT, lambda run: run.name),
    shown("plan", NAMES, lambda run: run.plan),
    shown("predicted peak", BYTES, lambda run: run.found and run.found.predicted.peak_allocated_bytes),
    shown("measured peak", BYTES, lambda run: run.found and run.found.measured.peak_allocated_bytes),
    shown("error", FIGURE, _error),
    shown(
        "result",
        WORDS,
        lambda run: run.refusal if run.found is None else " ".join([describe_short(run.found), *run.found.warnings]),
    ),
)


def run_table(runs: tuple[Run, ...]) -> list[Any]:
    """Returns the table of the recordings made under a plan."""
    if not runs:
        return []
    return [
        html.H3("Verified runs"),
        parts.note(
            "Other open recordings of the same model that were made under a plan: predicted against measured peak."
        ),
        parts.facts(FactTable(_RUNS, runs), label="verified runs"),
    ]


def planner_table(points: tuple[Point, ...]) -> list[Any]:
    """Returns what every planner needs at every budget, and what the planners do."""
    return [
        parts.note(f"Overhead over the recorded step time. {MARKS}."),
        parts.facts(overheads(points), label="overhead by planner and budget"),
        html.Details([html.Summary("planners"), parts.facts(planners(), label="planners")], className="as-table"),
    ]
