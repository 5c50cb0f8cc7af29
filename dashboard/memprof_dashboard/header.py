"""The header, the notice of new runs under a plan, and the dialog that lists the keys."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update, set_props

from memprof.errors import MemprofError
from memprof_dashboard import ids, parts
from memprof_dashboard.sources import Workspace
from memprof_dashboard.state import View

#: How often folders are looked at, in milliseconds.
_LOOK_MS = 3_000
_KEYS = (
    ("← →", "move the cursor by one operator; with Shift, to the same position in the next or previous step"),
    ("P", "move the cursor to the peak of the visible range"),
    ("+ \N{MINUS SIGN}", "zoom in or out around the cursor"),
    ("Home", "show everything"),
    ("/", "find"),
    ("T  F  M", "live tensors as a table, a flame graph, a treemap"),
    ("1 to 9", "open a page below the timeline"),
    ("Esc", "close this, or clear the selected storage and the search"),
    ("?", "this list"),
)


def header(workspace: Workspace) -> html.Header:
    """Returns the header's controls."""
    has_ranks = any(len(source.trace.ranks) > 1 for source in workspace.sources)
    return html.Header(
        [
            html.Span("memprof", className="brand"),
            html.Span(recording_choices(workspace, View()), id=ids.RECORDINGS, className="recordings"),
            parts.control("rank", dcc.Dropdown(rank_options(workspace, 0), None, id=ids.RANK), is_hidden=not has_ranks),
            html.Span(id=ids.BADGE, className="badge", role="status"),
            html.Span(className="spring"),
            parts.control(
                "find",
                dcc.Input(
                    id=ids.FIND,
                    type="search",
                    debounce=0.4,
                    placeholder="module, operator, file",
                    maxLength=200,
                ),
            ),
            parts.control(
                "budget",
                dcc.Input(id=ids.BUDGET, type="text", debounce=True, placeholder="24GiB or 60%", maxLength=40),
            ),
            icon_button("◐", ids.THEME_BUTTON, "switch between light and dark"),
            icon_button("?", ids.HELP_BUTTON, "keys (?)"),
        ],
        id=ids.HEADER,
    )


def recording_choices(workspace: Workspace, view: View) -> list[Any]:
    """Returns the controls that choose recordings; with a single one, its name."""
    options = [{"label": source.name, "value": place} for place, source in enumerate(workspace.sources)]
    is_single = len(options) == 1
    others = [{"label": "none", "value": -1}, *options]
    return [
        parts.control(
            "recording", dcc.Dropdown(options, view.trace, id=ids.TRACE, clearable=False), is_hidden=is_single
        ),
        html.Span(workspace.sources[0].name, className="only", hidden=not is_single),
        parts.control(
            "compare with", dcc.Dropdown(others, view.other, id=ids.OTHER, clearable=False), is_hidden=is_single
        ),
        html.Button("⇄", id=ids.SWAP_BUTTON, title="swap the two recordings", type="button", hidden=is_single),
    ]


def rank_options(workspace: Workspace, place: int) -> list[Any]:
    """Returns the choices of ranks of a recording."""
    return [{"label": f"rank {number}", "value": number} for number in workspace.source(place).trace.ranks]


def icon_button(label: str, name: str, title: str) -> html.Button:
    """Returns a quiet button; a single character on it is named by its title."""
    labelled: Any = {"aria-label": title} if len(label) == 1 else {}
    return html.Button(label, id=name, title=title, type="button", className="quiet", **labelled)


def new_runs_notice(workspace: Workspace) -> html.Div:
    """Returns what makes the browser ask for new runs."""
    return html.Div(
        [dcc.Interval(id=ids.NEW_RUNS, interval=_LOOK_MS), dcc.Store(id=ids.RUNS, data=len(workspace.sources))]
    )


def register_notice(app: Dash, workspace: Workspace) -> None:
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
    from memprof.analysis.plans.verify import describe_short
    from memprof_dashboard.whatif.planning import run_under_plan

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


def help_dialog() -> html.Dialog:
    """Returns the dialog, closed; ``assets/memprof.js`` opens it."""
    labelled: Any = {"aria-label": "keys"}
    rows = [part for keys, text in _KEYS for part in (html.Dt(html.Kbd(keys)), html.Dd(text))]
    return html.Dialog(
        [
            html.H2("Keys"),
            html.Dl(rows),
            html.P("The address holds the whole view: copy it to share what you see."),
            html.Button("Close", type="button", className="close-help"),
        ],
        id=ids.HELP,
        **labelled,
    )
