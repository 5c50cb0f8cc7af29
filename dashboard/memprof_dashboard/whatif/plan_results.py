"""Results of a plan search on the what-if page, and one plan in full."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update

from memprof_dashboard import ids, parts
from memprof_dashboard.figures.overlay import Curve, overlay
from memprof_dashboard.figures.shared import CONFIG, message
from memprof_dashboard.figures.whatif import Measured, Plans, is_on_front, pareto
from memprof_dashboard.page import or_message, or_sentence, theme_of
from memprof_dashboard.sources import Workspace
from memprof_dashboard.state import View
from memprof_dashboard.whatif.workspace import FOUND, RESULT, ROW, PlanSearch, PlanWorkspace

# What searches for plans is imported at use: the first timeline does not wait for it.
if TYPE_CHECKING:
    from memprof.analysis.plans.suggest import Suggestion
    from memprof.planners.search.candidate import Candidate
    from memprof_dashboard.whatif.planning import Detail, Run

_PARETO = "whatif-pareto"
_CHOSEN = "whatif-chosen"
_DETAIL = "whatif-detail"
_STEP = "whatif-step"
_SAVE = "whatif-save"
#: Where the browser takes a plan's file from; stays while results come and go.
FILE = "whatif-file"

_PLOT = {"height": "420px"}


def register_plans(app: Dash, workspace: Workspace, searches: PlanWorkspace) -> None:
    """Registers the callbacks."""

    @app.callback(Output(RESULT, "children"), Input(FOUND, "data"), State(ids.PLACE, "data"))
    @or_sentence
    def show(_: Any, place: Any) -> Any:
        search = searches.of(place)[0]
        if search is None or search.is_running:
            return [] if search is not None else _nothing_yet()
        from memprof.analysis.plans.suggest import Suggestion
        from memprof_dashboard.whatif import plan_parts

        found = search.result()
        if not isinstance(found, Suggestion):
            return plan_parts.changes(found)
        view = View.from_json(place)
        grown = search.rank is not workspace.rank(view.trace, view.rank)
        return _result(search, found, is_old=grown)

    @app.callback(
        Output(_CHOSEN, "data"),
        Input(_PARETO, "clickData"),
        Input({"type": ROW, "plan": ALL}, "n_clicks"),
        prevent_initial_call=True,
    )
    def choose(click: Any, _: Any) -> Any:
        name = ctx.triggered_id
        if isinstance(name, dict):
            return int(name["plan"]) if ctx.triggered[0]["value"] else no_update
        try:
            place = int(click["points"][0]["customdata"])
        except (KeyError, IndexError, TypeError, ValueError):
            return no_update
        return place if place >= 0 else no_update

    @app.callback(
        Output(_PARETO, "figure"),
        Input(_CHOSEN, "data"),
        Input(ids.THEME, "data"),
        State(ids.PLACE, "data"),
    )
    def draw(chosen: Any, theme: Any, place: Any) -> Any:
        over = searches.found(place)
        if over is None:
            return no_update
        from memprof_dashboard.whatif.planning import runs_under_plans

        runs = runs_under_plans(workspace, View.from_json(place))
        return or_message(_front)(over[1], runs, _place_in(over[1], chosen), theme)

    @app.callback(Output(_DETAIL, "children"), Input(_CHOSEN, "data"), State(ids.PLACE, "data"))
    @or_sentence
    def show_detail(chosen: Any, place: Any) -> Any:
        over = searches.found(place)
        if over is None or _place_in(over[1], chosen) < 0:
            return parts.empty("Plan details", "Select a point or a row to see the plan's predicted step.")
        search, found = over
        at = _place_in(found, chosen)
        return _detail(searches.detail(search, found, at), _plans_of(found)[at], found)

    @app.callback(
        Output(_STEP, "figure"),
        Input(_CHOSEN, "data"),
        Input(ids.THEME, "data"),
        State(ids.PLACE, "data"),
    )
    def draw_step(chosen: Any, theme: Any, place: Any) -> Any:
        over = searches.found(place)
        if over is None or _place_in(over[1], chosen) < 0:
            return message("Select a plan to see its step.", theme_of(theme))
        search, found = over
        return or_message(_step)(searches.detail(search, found, _place_in(found, chosen)), found, theme)

    @app.callback(
        Output(FILE, "data"),
        Input(_SAVE, "n_clicks"),
        State(_CHOSEN, "data"),
        State(ids.PLACE, "data"),
        prevent_initial_call=True,
    )
    def save(clicks: Any, chosen: Any, place: Any) -> Any:
        over = searches.found(place)
        if not clicks or over is None or _place_in(over[1], chosen) < 0:
            return no_update
        from memprof.policies.plan.plan_file import format_plan

        search, found = over
        plan = searches.detail(search, found, _place_in(found, chosen)).plan
        return {"content": format_plan(plan), "filename": "plan.toml", "type": "application/toml"}


def _nothing_yet() -> Any:
    return parts.empty(
        "No search run yet",
        "Enter a memory budget and search. Each candidate plan is replayed on every step of this recording, on this "
        "machine, without running the job; most searches take seconds.",
    )


def _plans_of(found: Suggestion) -> tuple[Candidate, ...]:
    from memprof_dashboard.whatif.planning import plans_of

    return plans_of(found)


def _place_in(found: Suggestion, chosen: Any) -> int:
    """Returns a plan's place as a browser sent it; -1 where it makes no sense."""
    return chosen if type(chosen) is int and 0 <= chosen < len(_plans_of(found)) else -1


def _result(search: PlanSearch, found: Suggestion, *, is_old: bool) -> list[Any]:
    from memprof_dashboard.whatif import plan_parts

    plans = _plans_of(found)
    remarks = (
        [parts.note("The recording has grown since this search; search again to include the new data.")]
        if is_old
        else []
    )
    if not plans:
        return [*plan_parts.summary(found), *remarks]
    best = found.answer.best
    first = found.answer.least if best is None else best
    chosen = next((place for place, one in enumerate(plans) if one is first), 0)
    cloud = _cloud(found)
    on_front = is_on_front(cloud.peak_bytes, cloud.relative_time).tolist()
    return [
        dcc.Store(id=_CHOSEN, data=chosen),
        *plan_parts.summary(found),
        *remarks,
        html.Div(
            [
                html.Div(
                    [
                        html.H3("Plans tried"),
                        dcc.Graph(id=_PARETO, config=CONFIG, responsive=True, style=_PLOT),
                        plan_parts.tried_table(found, on_front),
                    ]
                ),
                html.Div(
                    [
                        html.Div(id=_DETAIL),
                        parts.graph(_STEP, "300px"),
                    ],
                    className="plan",
                ),
            ],
            className="halves even",
        ),
        *plan_parts.result_tables(found),
    ]


def _cloud(found: Suggestion) -> Plans:
    plans = _plans_of(found)
    recorded = found.answer.recorded.step_time_us or math.nan
    return Plans(
        peak_bytes=np.array([one.peak_bytes for one in plans], dtype=np.int64),
        relative_time=np.array([one.step_time_us / recorded for one in plans], dtype=np.float64),
        names=[one.plan.describe() for one in plans],
    )


def _front(found: Suggestion, runs: tuple[Run, ...], chosen: int, theme: Any) -> Any:
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


def _step(detail: Detail, found: Suggestion, theme: Any) -> Any:
    return overlay(
        Curve("recorded", detail.recorded, detail.recorded_phases),
        Curve("with the plan", detail.predicted, detail.predicted_phases),
        theme_of(theme),
        budget_bytes=found.answer.search_request.budget_bytes,
    )


def _detail(detail: Detail, one: Candidate, found: Suggestion) -> list[Any]:
    from memprof.analysis.plans.predict import commands_under
    from memprof_dashboard.whatif import plan_parts

    commands = commands_under(found.manifest, "plan.toml")
    return [*plan_parts.plan_facts(detail, one, found), *plan_parts.command_of(_SAVE, commands)]
