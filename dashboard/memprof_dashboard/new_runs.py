"""Runs under a plan that appear next to an open recording: they are opened, and compared with it at once."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update, set_props

from memprof.analysis.plans.verify import describe_short
from memprof.errors import MemprofError
from memprof_dashboard import ids, parts
from memprof_dashboard.header import recording_choices
from memprof_dashboard.sources import Workspace
from memprof_dashboard.state import View
from memprof_dashboard.whatif.planning import run_under_plan

#: How often folders are looked at, in milliseconds.
_LOOK_MS = 3_000


def layout(workspace: Workspace) -> html.Div:
    """Returns what makes the browser ask for new runs."""
    return html.Div(
        [dcc.Interval(id=ids.NEW_RUNS, interval=_LOOK_MS), dcc.Store(id=ids.RUNS, data=len(workspace.sources))]
    )


def register(app: Dash, workspace: Workspace) -> None:
    """Registers the callback that opens new runs."""

    @app.callback(
        Output(ids.RUNS, "data"),
        Output(ids.RECORDINGS, "children"),
        Output(ids.GO, "data", allow_duplicate=True),
        Input(ids.NEW_RUNS, "n_intervals"),
        State(ids.RUNS, "data"),
        State(ids.VIEW, "data"),
        prevent_initial_call=True,
    )
    def look(_: Any, known: Any, whole: Any) -> Any:
        workspace.open_new_runs()
        count = len(workspace.sources)
        if whole is None or known == count:
            return no_update, no_update, no_update
        view = View.from_json(whole)
        place, sentence = _newest(workspace, view, int(known))
        if sentence:
            set_props(ids.NOTE, {"children": parts.note(sentence)})
        is_shown = place >= 0 and view.other < 0
        view = view.change(other=place) if is_shown else view
        return count, recording_choices(workspace, view), {"other": place} if is_shown else no_update


def _newest(workspace: Workspace, view: View, known: int) -> tuple[int, str]:
    """Returns the place of the newest run of the job, and a sentence on it; -1 and "" where there is none."""
    try:
        rank = workspace.rank(view.trace, view.rank)
        for place in reversed(range(known, len(workspace.sources))):
            run = run_under_plan(rank, workspace.sources[place], view.rank)
            if run is not None:
                result = run.refusal if run.found is None else describe_short(run.found)
                return place, f"New run {run.name}: {result}"
    except MemprofError as error:
        return -1, str(error)
    return -1, ""
