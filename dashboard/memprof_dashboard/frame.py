"""The first screen: the recordings, the verdict, the timeline, and next to it the tensors alive at the cursor."""

from __future__ import annotations

import csv
import io
from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, Patch, State, ctx, dcc, html, no_update

from memprof_dashboard import ids, parts
from memprof_dashboard.figures.shared import BLANK
from memprof_dashboard.figures.timeline import overview
from memprof_dashboard.figures.timeline_marks import cursor_line
from memprof_dashboard.header import header, icon_button, rank_options
from memprof_dashboard.page import LATER, or_message, or_sentence, theme_of, view_of
from memprof_dashboard.side.panel import SidePanel
from memprof_dashboard.sources import MemprofError, Workspace
from memprof_dashboard.state import View, clock_of, shown
from memprof_dashboard.summary_bar import facts_of, legend, readout
from memprof_dashboard.views.timelines import (
    OVER,
    has_two,
    held_at,
    main_timeline,
    on_axis,
    other_timeline,
    rows_of,
    stretches,
)

_MOST_TABLE_ROWS = 200
#: The same of the second recording's timeline as ``ids.DRAWN_AT``.
_OTHER_DRAWN_AT = "other-drawn-at"
_LAY_SWITCH, _AXIS_SWITCH = "lay-switch", "axis-switch"
_FIRST = "first"
_TIMELINE = {"height": "var(--timeline-height)"}
_HALF = {"height": "max(240px, calc(var(--timeline-height) / 2))"}


def layout(workspace: Workspace, side: SidePanel) -> html.Div:
    """Returns the components above the pages."""
    labelled: Any = {"aria-label": "timeline"}
    return html.Div(
        [
            header(workspace),
            html.Div(id=ids.NOTE, role="status"),
            html.Div(id=ids.FACTS, className="verdict-bar"),
            dcc.Store(id=_OTHER_DRAWN_AT),
            html.Div(
                [
                    html.Section(
                        [
                            html.Div(
                                [
                                    *(
                                        icon_button(label, name, title)
                                        for label, name, title in (
                                            ("Peak", ids.PEAK_BUTTON, "go to the peak of the visible range (P)"),
                                            ("+", ids.IN_BUTTON, "zoom in (+)"),
                                            ("\N{MINUS SIGN}", ids.OUT_BUTTON, "zoom out (-)"),
                                            ("All", ids.ALL_BUTTON, "show everything (Home)"),
                                            ("CSV", ids.DOWNLOAD_BUTTON, "download the timeline as CSV"),
                                            ("PNG", ids.PNG_BUTTON, "download the timeline as a picture"),
                                        )
                                    ),
                                    html.Span(
                                        parts.switch(ids.LAY, {"below": "below", OVER: "over"}, "second recording"),
                                        id=_LAY_SWITCH,
                                        hidden=True,
                                        title="draw the second recording below the first, or as a line over it",
                                    ),
                                    html.Span(
                                        parts.switch(ids.AXIS, {"ops": "operators", "time": "time"}, "x axis"),
                                        id=_AXIS_SWITCH,
                                        hidden=True,
                                        title="x axis: one operator like the next, or as long as it runs",
                                    ),
                                    html.Span("drag to zoom, click to pin the cursor", className="hint"),
                                ],
                                className="tools",
                            ),
                            parts.graph(ids.OVERVIEW, "48px", has_bar=False, figure=BLANK),
                            parts.graph(ids.TIMELINE, figure=BLANK, style=_TIMELINE),
                            parts.graph(ids.TIMELINE_OTHER, style={"display": "none"}),
                            html.Div(id=ids.PHASES, className="phases"),
                            html.Div(id=ids.TIMELINE_TABLE),
                        ],
                        className="time",
                        **labelled,
                    ),
                    side.layout(),
                ],
                id=_FIRST,
                className="first",
            ),
        ],
        className="frame",
    )


def register(app: Dash, workspace: Workspace) -> None:
    """Registers the callbacks that draw it.

    Callbacks that can wait for the timeline do: answers share one processor, and users look at the timeline first.
    """

    @app.callback(
        Output(ids.PHASES, "children"),
        Input(ids.DRAWN_AT, "data"),
        Input(ids.CURSOR, "data"),
        State(ids.WINDOW, "data"),
        **LATER,
    )
    def show_legend(_: Any, cursor: Any, window: Any) -> Any:
        view = view_of(window)
        try:
            rank = workspace.rank(view.trace, view.rank)
            at = shown(view.change(at=View.from_json(cursor).at), rank).at
            held = held_at(rank.history, at) if rank.history.ops else {}
            return legend(stretches(workspace, view), held, has_phases=rank.has_phases)
        except MemprofError:
            return None  # the verdict's place has the reason

    @app.callback(Output(_FIRST, "className"), Output(_AXIS_SWITCH, "hidden"), Input(ids.PLACE, "data"), **LATER)
    def arrange(place: Any) -> Any:
        view = View.from_json(place)
        try:
            rank = workspace.rank(view.trace, view.rank) if place is not None else None
            is_end_state, has_clock = (rank.is_end_state, rank.clock is not None) if rank else (False, False)
        except MemprofError:
            return no_update, no_update  # the verdict's place has the reason
        return "first end-state" if is_end_state else "first", not has_clock

    app.clientside_callback(  # type: ignore[no-untyped-call]  # dash has no types for it
        ClientsideFunction("memprof", "splitRest"),
        Output(ids.CURSOR, "data", allow_duplicate=True),
        Output(ids.PLACE, "data", allow_duplicate=True),
        Input(ids.DRAWN_AT, "data"),
        State(ids.VIEW, "data"),
        State(ids.TICK, "data"),
        State(ids.CURSOR, "data"),
        prevent_initial_call=True,
    )

    @app.callback(Output(ids.FACTS, "children"), Input(ids.DRAWN_AT, "data"), State(ids.WINDOW, "data"))
    @or_sentence
    def show_facts(_: Any, window: Any) -> Any:
        view = view_of(window)
        return facts_of(workspace.rank(view.trace, view.rank), view, workspace.second_of(view.trace))

    @app.callback(Output(ids.RANK, "options"), Input(ids.PLACE, "data"), **LATER)
    def list_ranks(place: Any) -> Any:
        return no_update if place is None else rank_options(workspace, View.from_json(place).trace)

    @app.callback(
        Output(ids.TIMELINE, "figure"),
        Output(ids.DRAWN_AT, "data"),
        Input(ids.WINDOW, "data"),
        Input(ids.THEME, "data"),
        Input(ids.DRY, "data"),
        State(ids.VIEW, "data"),
    )
    def draw_timeline(window: Any, theme: Any, _: Any, whole: Any) -> Any:
        view, at = view_of(window), View.from_json(whole).at
        return or_message(main_timeline)(workspace, view, at, theme), at

    @app.callback(
        Output(ids.TIMELINE_OTHER, "figure"),
        Output(_OTHER_DRAWN_AT, "data"),
        Output(ids.TIMELINE_OTHER, "style"),
        Output(ids.TIMELINE, "style"),
        Output(_LAY_SWITCH, "hidden"),
        Input(ids.WINDOW, "data"),
        Input(ids.THEME, "data"),
        State(ids.VIEW, "data"),
    )
    def draw_other(window: Any, theme: Any, whole: Any) -> Any:
        view, at = View.from_json(window), View.from_json(whole).at
        if window is None or not has_two(view):
            return no_update, None, {"display": "none"}, _TIMELINE, view.other < 0
        return or_message(other_timeline)(workspace, view, at, theme), at, _HALF, _HALF, False

    @app.callback(
        Output(ids.OVERVIEW, "figure"), Input(ids.DRAWN_AT, "data"), State(ids.WINDOW, "data"), State(ids.THEME, "data")
    )
    @or_message
    def draw_overview(_: Any, window: Any, theme: Any) -> Any:
        view = view_of(window)
        rank = workspace.rank(view.trace, view.rank)
        now = shown(view, rank)
        return overview(rank.history, now.first, now.end, theme_of(theme), clock_of(view, rank))

    _move_cursor(app, workspace, ids.TIMELINE, ids.DRAWN_AT)
    _move_cursor(app, workspace, ids.TIMELINE_OTHER, _OTHER_DRAWN_AT)

    @app.callback(Output(ids.READOUT, "children"), Input(ids.CURSOR, "data"), **LATER)
    @or_sentence
    def read_out(cursor: Any) -> Any:
        view = view_of(cursor)
        return readout(workspace.rank(view.trace, view.rank), view)

    @app.callback(Output(ids.TIMELINE_TABLE, "children"), Input(ids.DRAWN_AT, "data"), State(ids.WINDOW, "data"))
    @or_sentence
    def tabulate(_: Any, window: Any) -> Any:
        view = view_of(window)
        heads, rows = rows_of(workspace.rank(view.trace, view.rank), view, _MOST_TABLE_ROWS)
        return parts.as_table(heads, rows, label="timeline data")

    @app.callback(
        Output(ids.DOWNLOAD, "data"),
        Input(ids.DOWNLOAD_BUTTON, "n_clicks"),
        State(ids.VIEW, "data"),
        prevent_initial_call=True,
    )
    def download(clicks: Any, whole: Any) -> Any:
        if not clicks:
            return no_update
        view = View.from_json(whole)
        heads, rows = rows_of(workspace.rank(view.trace, view.rank), view, None)
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow([head.removeprefix(">") for head in heads])
        writer.writerows(rows)
        return {"content": text.getvalue(), "filename": "memprof-timeline.csv", "type": "text/csv"}


def _move_cursor(app: Dash, workspace: Workspace, timeline: str, drawn: str) -> None:
    """Registers the callback that moves the cursor of a timeline, by the name of the store of where it was drawn."""

    # Waits for a figure still being drawn, which may have the cursor at its previous position.
    @app.callback(
        Output(timeline, "figure", allow_duplicate=True),
        Input(ids.CURSOR, "data"),
        Input(drawn, "data"),
        State(ids.THEME, "data"),
        prevent_initial_call=True,
    )
    def move(cursor: Any, drawn_at: Any, theme: Any) -> Any:
        view = View.from_json(cursor)
        at = view.at
        is_there = at == drawn_at and list(ctx.triggered_prop_ids.values()) == [drawn]
        if cursor is None or drawn_at is None or is_there:
            return no_update
        patch = Patch()
        rank = workspace.rank(view.trace, view.rank)
        patch["layout"]["shapes"][0] = cursor_line(float(on_axis(rank, view)(at + 0.5)), theme_of(theme))
        return patch
