"""Plans that fit a job into a budget, and their cost: searched in the background, shown as a Pareto front."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from dash import Dash, Input, Output, State, ctx, dcc, html, no_update

from memprof.errors import MemprofError
from memprof.units import format_bytes, format_count
from memprof_dashboard import ids, parts
from memprof_dashboard.figures.whatif import PlannerLine, planner_lines
from memprof_dashboard.page import or_message, or_sentence, theme_of
from memprof_dashboard.sources import Workspace
from memprof_dashboard.state import View
from memprof_dashboard.whatif import draft_page
from memprof_dashboard.whatif.plan_results import FILE, register_plans
from memprof_dashboard.whatif.workspace import (
    COMPARED,
    FOUND,
    PLANNERS,
    RESULT,
    PlannerSearch,
    PlanSearch,
    PlanWorkspace,
    key_of,
)

# What searches for plans is imported at use: the first timeline does not wait for it.
if TYPE_CHECKING:
    from memprof.analysis.plans.compare_planners import Point
    from memprof.analysis.plans.suggest import Suggestion
    from memprof.analysis.snapshot_plans.change import SnapshotPlans
    from memprof.planners.search.candidate import Candidate

_BUDGET = "whatif-budget"
_SEEN = "whatif-seen"  # the budget line last copied into the field
_ALLOW = "whatif-allow"
_SEARCH = "whatif-search"
_STOP = "whatif-stop"
_COMPARE = "whatif-compare"
_MISTAKE = "whatif-mistake"
_PROGRESS = "whatif-progress"
_CLOCK = "whatif-clock"
_STARTED = "whatif-started"
_ASKED = "whatif-asked"  # budget and policies of the last search
_STALE = "whatif-stale"
_RUNS = "whatif-runs"

#: Polling interval of a running search, in milliseconds.
_TICK_MS = 400


class WhatIf:
    """The plan search, its results, and one plan in full."""

    TITLE = "What if"

    def layout(self, workspace: Workspace, view: View) -> Any:
        """Returns the form and the containers of the search results."""
        from memprof.policies.registry import default_policies, policy_types

        options = [
            {"label": html.Span(kind.name, title=kind.flag_help), "value": kind.name}
            for kind in policy_types()
            if kind.source != "measured"
        ]
        return html.Div(
            [
                draft_page.layout(),
                html.H3("Find plans"),
                html.Div(
                    [
                        parts.control(
                            "budget", dcc.Input(id=_BUDGET, type="text", placeholder="24GiB or 60%", maxLength=40)
                        ),
                        html.Button("Search", id=_SEARCH, type="button", className="main"),
                        html.Button("Stop", id=_STOP, type="button", disabled=True),
                        html.Button("Compare planners", id=_COMPARE, type="button"),
                        html.Fieldset(
                            [
                                html.Legend("policies to consider"),
                                dcc.Checklist(options, list(default_policies()), id=_ALLOW, inline=True),
                            ]
                        ),
                    ],
                    className="ask",
                ),
                html.Div(id=_MISTAKE, role="alert"),
                html.Div(id=_STALE, role="status"),
                html.Div(id=_PROGRESS, role="status", className="progress"),
                dcc.Interval(id=_CLOCK, interval=_TICK_MS, disabled=True),
                *(dcc.Store(id=name) for name in (_SEEN, _STARTED, _ASKED, FOUND, COMPARED)),
                dcc.Download(id=FILE),
                html.Div(id=RESULT),
                html.Div(_runs(workspace, view), id=_RUNS),
                html.Div(id=PLANNERS),
            ],
            className="whatif",
        )

    def register(self, app: Dash, workspace: Workspace) -> None:
        """Registers the callbacks."""
        searches = PlanWorkspace(workspace)
        draft_page.register(app, workspace)
        _register_form(app, workspace, searches)
        _register_runs(app, workspace)
        register_plans(app, workspace, searches)
        register_planners(app, searches)


def _register_form(app: Dash, workspace: Workspace, searches: PlanWorkspace) -> None:
    @app.callback(
        Output(_BUDGET, "value"),
        Output(_SEEN, "data"),
        Input(ids.WINDOW, "data"),
        State(_SEEN, "data"),
    )
    def prefill(window: Any, seen: Any) -> Any:
        budget = View.from_json(window).budget
        return (no_update, no_update) if window is None or budget == seen else (budget, budget)

    @app.callback(
        Output(_STARTED, "data"),
        Output(_MISTAKE, "children"),
        Output(_ASKED, "data"),
        Output(ids.GO, "data", allow_duplicate=True),
        Input(_SEARCH, "n_clicks"),
        Input(_BUDGET, "n_submit"),
        Input(_STOP, "n_clicks"),
        Input(_COMPARE, "n_clicks"),
        State(_BUDGET, "value"),
        State(_ALLOW, "value"),
        State(ids.PLACE, "data"),
        prevent_initial_call=True,
    )
    def begin(*_: Any) -> Any:
        from memprof.analysis.snapshot_plans.change_search import lacks_operators
        from memprof_dashboard.whatif import planning

        name = ctx.triggered_id
        if not ctx.triggered or not ctx.triggered[0]["value"]:
            return no_update, no_update, no_update, no_update
        place = ctx.states[f"{ids.PLACE}.data"]
        view = View.from_json(place)
        rank = workspace.rank(view.trace, view.rank)
        if name == _STOP:
            for search in searches.of(place):
                if search is not None:
                    search.stop()
            return no_update, [], no_update, no_update
        if name == _COMPARE:
            begun = searches.planners.start(key_of(view), rank, "", lambda report: planning.run_planners(rank, report))
            return begun.number, [], no_update, no_update
        budget, allowed = ctx.states[f"{_BUDGET}.value"], ctx.states[f"{_ALLOW}.value"]
        form = planning.SearchForm(str(budget or "")[:40], tuple(map(str, allowed or ())))
        try:
            form.check()
        except MemprofError as error:
            return no_update, html.P(str(error), className="warning"), no_update, no_update

        def find(report: Callable[[Candidate], None]) -> Suggestion | SnapshotPlans:
            if lacks_operators(rank.trace):
                return planning.find_changes(rank, form)
            return planning.find_plans(rank, form, workspace.dry_frames, report)

        started = searches.plans.start(key_of(view), rank, form.budget, find)
        return -started.number, [], [form.budget, sorted(form.allow)], {"budget": form.budget}

    @app.callback(
        Output(_STALE, "children"),
        Input(_BUDGET, "value"),
        Input(_ALLOW, "value"),
        Input(_ASKED, "data"),
    )
    def mark_stale(budget: Any, allowed: Any, asked: Any) -> Any:
        if not isinstance(asked, list) or asked == [str(budget or ""), sorted(map(str, allowed or ()))]:
            return None
        sentence = f"The plans below were searched for {str(asked[0])[:40]}, before the settings changed: search again."
        return html.P(sentence, className="warning stale")

    @app.callback(
        Output(_PROGRESS, "children"),
        Output(_CLOCK, "disabled"),
        Output(_STOP, "disabled"),
        Output(FOUND, "data"),
        Output(COMPARED, "data"),
        Input(_CLOCK, "n_intervals"),
        Input(_STARTED, "data"),
        Input(ids.PLACE, "data"),
        State(FOUND, "data"),
        State(COMPARED, "data"),
    )
    def watch(_: Any, __: Any, place: Any, found: Any, compared: Any) -> Any:
        both = searches.of(place)
        lines = [*_plan_progress(both[0]), *_planner_progress(both[1])]
        is_running = any(search is not None and search.is_running for search in both)
        # 0 before any search and -1 during one, so that the result's place changes when one starts.
        over = [0 if search is None else -1 if search.is_running else search.number for search in both]
        shown = [no_update if now == before else now for now, before in zip(over, (found, compared), strict=True)]
        return lines, not is_running, not is_running, *shown


def _register_runs(app: Dash, workspace: Workspace) -> None:
    @app.callback(
        Output(_RUNS, "children"), Input(ids.RUNS, "data"), State(ids.PLACE, "data"), prevent_initial_call=True
    )
    @or_sentence
    def show_runs(_: Any, place: Any) -> Any:
        return _runs(workspace, View.from_json(place))


def _runs(workspace: Workspace, view: View) -> Any:
    from memprof_dashboard.whatif import plan_parts, planning

    return plan_parts.run_table(planning.runs_under_plans(workspace, view))


def _plan_progress(search: PlanSearch | None) -> list[Any]:
    if search is None or not search.is_running:
        return []
    from memprof_dashboard.whatif.planning import TIME_LIMIT_S

    tried = list(search.found)
    sentence = f"Searching for {search.what}: {format_count(len(tried), 'plan')} replayed in {search.seconds:.0f} s"
    if tried:
        least = min(tried, key=lambda one: one.peak_bytes)
        sentence += f", lowest peak so far {format_bytes(least.peak_bytes)} with {least.plan.describe()}"
    ending = " Stopping; the results so far are kept." if search.was_stopped else ""
    bar = html.Progress(max=str(TIME_LIMIT_S), value=f"{search.seconds:.1f}")
    return [html.P([bar, " ", parts.name(f"{sentence}.{ending}", 400)])]


def _planner_progress(search: PlannerSearch | None) -> list[Any]:
    if search is None or not search.is_running:
        return []
    from memprof_dashboard.whatif.planning import count_points

    done = len(search.found)
    last = f" (last: {search.found[-1].planner})" if done else ""
    sentence = f" Comparing planners: {done} of {count_points()} results in {search.seconds:.0f} s{last}."
    ending = " Stopping; the results so far are kept." if search.was_stopped else ""
    return [html.P([html.Progress(max=str(count_points()), value=str(done)), sentence + ending])]


_LINES = "whatif-lines"


def register_planners(app: Dash, searches: PlanWorkspace) -> None:
    """Registers the callbacks."""

    @app.callback(Output(PLANNERS, "children"), Input(COMPARED, "data"), State(ids.PLACE, "data"))
    @or_sentence
    def show(_: Any, place: Any) -> Any:
        search = searches.of(place)[1]
        if search is None or search.is_running:
            return []
        from memprof_dashboard.whatif import plan_parts, planning

        points = search.result()
        remarks = []
        if len(points) < (count := planning.count_points()):
            remarks.append(parts.note(f"Stopped: showing {len(points)} of {count} results."))
        return [
            html.H3("Overhead by planner"),
            parts.note(
                "Planners schedule single operators; plans act on whole modules, so these figures are a lower bound "
                "for them."
            ),
            *remarks,
            parts.graph(_LINES, "460px"),
            *plan_parts.planner_table(points),
        ]

    @app.callback(Output(_LINES, "figure"), Input(COMPARED, "data"), Input(ids.THEME, "data"), State(ids.PLACE, "data"))
    def draw(_: Any, theme: Any, place: Any) -> Any:
        search = searches.of(place)[1]
        if search is None or search.is_running:
            return no_update
        return or_message(_lines)(search.result(), theme)


def _lines(points: tuple[Point, ...], theme: Any) -> Any:
    lines = []
    for name in dict.fromkeys(point.planner for point in points):
        own = [point for point in points if point.planner == name]
        lines.append(
            PlannerLine(
                name,
                np.array([point.share for point in own]),
                np.array([point.overhead for point in own]),
                [point.reason for point in own],
            )
        )
    shares = sorted({point.share for point in points})
    bounds = [max(point.bound for point in points if point.share == share) for share in shares]
    return planner_lines(lines, (np.array(shares), np.array(bounds)), theme_of(theme))
