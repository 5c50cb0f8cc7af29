"""Results of a plan search on the what-if page, and one plan in full."""

from __future__ import annotations

from typing import Any

from dash import ALL, Dash, Input, Output, State, ctx, no_update

from memprof_dashboard import ids, parts
from memprof_dashboard.figures.shared import message
from memprof_dashboard.page import or_message, or_sentence, theme_of
from memprof_dashboard.sources import Workspace
from memprof_dashboard.state import View
from memprof_dashboard.whatif.workspace import CHOSEN, DETAIL, FOUND, PARETO, RESULT, ROW, SAVE, STEP, PlanWorkspace

#: Where the browser takes a plan's file from; stays while results come and go.
FILE = "whatif-file"


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
        return plan_parts.result(search, found, is_old=grown)

    @app.callback(
        Output(CHOSEN, "data"),
        Input(PARETO, "clickData"),
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
        Output(PARETO, "figure"),
        Input(CHOSEN, "data"),
        Input(ids.THEME, "data"),
        State(ids.PLACE, "data"),
    )
    def draw(chosen: Any, theme: Any, place: Any) -> Any:
        over = searches.found(place)
        if over is None:
            return no_update
        from memprof_dashboard.whatif import plan_parts, planning

        runs = planning.runs_under_plans(workspace, View.from_json(place))
        return or_message(plan_parts.front)(over[1], runs, plan_parts.place_in(over[1], chosen), theme)

    @app.callback(Output(DETAIL, "children"), Input(CHOSEN, "data"), State(ids.PLACE, "data"))
    @or_sentence
    def show_detail(chosen: Any, place: Any) -> Any:
        from memprof_dashboard.whatif import plan_parts

        over = searches.found(place)
        if over is None or (at := plan_parts.place_in(over[1], chosen)) < 0:
            return parts.empty("Plan details", "Select a point or a row to see the plan's predicted step.")
        return plan_parts.plan_facts(searches.detail(*over, at), at, over[1])

    @app.callback(
        Output(STEP, "figure"),
        Input(CHOSEN, "data"),
        Input(ids.THEME, "data"),
        State(ids.PLACE, "data"),
    )
    def draw_step(chosen: Any, theme: Any, place: Any) -> Any:
        from memprof_dashboard.whatif import plan_parts

        over = searches.found(place)
        if over is None or (at := plan_parts.place_in(over[1], chosen)) < 0:
            return message("Select a plan to see its step.", theme_of(theme))
        return or_message(plan_parts.step_figure)(searches.detail(*over, at), over[1], theme)

    @app.callback(
        Output(FILE, "data"),
        Input(SAVE, "n_clicks"),
        State(CHOSEN, "data"),
        State(ids.PLACE, "data"),
        prevent_initial_call=True,
    )
    def save(clicks: Any, chosen: Any, place: Any) -> Any:
        from memprof.policies.plan.plan_file import format_plan
        from memprof_dashboard.whatif import plan_parts

        over = searches.found(place)
        if not clicks or over is None or (at := plan_parts.place_in(over[1], chosen)) < 0:
            return no_update
        plan = searches.detail(*over, at).plan
        return {"content": format_plan(plan), "filename": "plan.toml", "type": "application/toml"}


def _nothing_yet() -> Any:
    return parts.empty(
        "No search run yet",
        "Enter a memory budget and search. Each candidate plan is replayed on every step of this recording, on this "
        "machine, without running the job; most searches take seconds.",
    )
