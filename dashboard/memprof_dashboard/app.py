"""The app: the timeline on top, a page below it, and the view that both follow."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, State, ctx, dcc, html, no_update, set_props

from memprof.trace.manifest import UNFINISHED
from memprof_dashboard import frame, header, ids, parts, zoom
from memprof_dashboard.editors import EDITORS
from memprof_dashboard.guard import guarded_app
from memprof_dashboard.header import help_dialog, recording_choices
from memprof_dashboard.page import LATER, or_sentence, view_of
from memprof_dashboard.pages import PAGES, empty_pages
from memprof_dashboard.side.panel import SidePanel, grouped
from memprof_dashboard.sources import MemprofError, Source, Workspace
from memprof_dashboard.state import View, clock_of, on_click, on_key, on_zoom, shown
from memprof_dashboard.whatif.dry_frames import DryFrames

#: Controls whose value is a part of the view; all but the tabs by its name.
_CONTROLS = (ids.TRACE, ids.RANK, ids.OTHER, ids.FIND, ids.BUDGET, ids.TABS, ids.SIDE, ids.BY, ids.LAY, ids.AXIS)
#: Polling interval for a recording in progress, in milliseconds.
_TICK_MS = 2_000


def create_app(
    sources: list[Source],
    *,
    token: str,
    hosts: Sequence[str] = ("127.0.0.1", "localhost", "::1"),
    prefix: str = "/",
    editor: str = EDITORS["vscode"],
    dry_frames: DryFrames | None = None,
) -> Dash:
    """Creates the dashboard app for some recordings.

    Args:
        sources: The recordings, at least one.
        token: Token that a browser must present; see ``guard``.
        hosts: Names under which it is served.
        prefix: Path, with slashes around, below which it is served at a path of its own (``own_path``).
        editor: The address that opens a source line, as in ``side.editor``.
        dry_frames: Dry runs of their jobs; None to run nothing.

    Returns:
        The app; it is not running yet.
    """
    workspace = Workspace(sources, dry_frames)
    side = SidePanel(editor)
    app = guarded_app(token, hosts, prefix, _print_error)
    app.layout = _layout(workspace, side)
    _register(app, workspace)
    frame.register(app, workspace)
    zoom.register(app, workspace)
    side.register(app, workspace)
    header.register_notice(app, workspace)
    for page in PAGES.values():
        page.register(app, workspace)
    return app


def _layout(workspace: Workspace, side: SidePanel) -> html.Main:
    has_spool = any(source.is_spool for source in workspace.sources)
    below: Any = {"role": "tabpanel", "aria-label": "page"}
    return html.Main(
        [
            dcc.Location(id=ids.URL, refresh=False),
            *(dcc.Store(id=name) for name in ids.STORES),
            dcc.Store(id=ids.THEME, data="light"),
            dcc.Store(id=ids.TICK, data=0),
            dcc.Interval(id=ids.LIVE, interval=_TICK_MS, disabled=not has_spool),
            dcc.Download(id=ids.DOWNLOAD),
            header.new_runs_notice(workspace),
            frame.layout(workspace, side),
            dcc.Tabs(
                id=ids.TABS,
                value=View().tab,
                mobile_breakpoint=0,
                className="tabs",
                children=[
                    dcc.Tab(label=html.Span(page.TITLE, id=f"tab-{name}"), value=name, className="tab")
                    for name, page in PAGES.items()
                ],
            ),
            html.H2("Pages", className="unseen"),
            dcc.Loading(
                html.Section(id=ids.PANEL, **below),
                delay_show=400,
                type="dot",
                className="loading",
                overlay_style={"visibility": "visible", "opacity": 0.5},  # one part that waits hides no other
            ),
            help_dialog(),
        ],
        className="memprof",
    )


def _register(app: Dash, workspace: Workspace) -> None:
    """Registers the callbacks that update the view and distribute its parts."""
    changes = [
        Input(ids.URL, "search"),
        *(Input(name, "data") for name in (ids.KEY, ids.GO)),
        Input(ids.TIMELINE, "clickData"),
        *(Input(name, "value") for name in _CONTROLS),
    ]

    @app.callback(
        Output(ids.VIEW, "data"),
        Output(ids.URL, "search"),
        *changes,
        State(ids.ZOOMED, "data"),
        State(ids.VIEW, "data"),
    )
    def react(*_: Any) -> tuple[Any, Any]:
        before, zoom = ctx.states[f"{ids.VIEW}.data"], ctx.states[f"{ids.ZOOMED}.data"]
        search = ctx.inputs[f"{ids.URL}.search"]
        is_first = before is None
        old = View.from_search(search) if is_first else View.from_json(before)
        view = old
        has_zoomed = _has_zoomed(zoom, before)
        if has_zoomed:  # before anything else was done
            view = _zoomed(workspace, view, zoom)
        if not is_first:
            for trigger in ctx.triggered:
                name, _, what = trigger["prop_id"].partition(".")
                view = _after(workspace, view, name, what, trigger["value"])
        if view == old and not is_first and not has_zoomed:
            return no_update, no_update
        seen = zoom.get("count") if isinstance(zoom, dict) else None
        kept = view.to_search()
        return {**_resolved(workspace, view).to_json(), "zoomed": seen}, no_update if kept == search else kept

    app.clientside_callback(ClientsideFunction("memprof", "sent"), *changes)  # type: ignore[no-untyped-call]  # dash has no types for it

    # In the browser: forwards the parts of the view that changed and updates the controls.
    app.clientside_callback(  # type: ignore[no-untyped-call]  # dash has no types for it
        ClientsideFunction("memprof", "split"),
        Output(ids.WINDOW, "data"),
        Output(ids.CURSOR, "data"),
        Output(ids.PLACE, "data"),
        Input(ids.VIEW, "data"),
        Input(ids.TICK, "data"),
        State(ids.WINDOW, "data"),
        State(ids.CURSOR, "data"),
        State(ids.PLACE, "data"),
    )

    @app.callback(Output(ids.PANEL, "children"), Input(ids.PLACE, "data"), **LATER)
    @or_sentence
    def show_panel(place: Any) -> Any:
        return _panel(workspace, view_of(place))

    @app.callback(
        [Output(f"tab-{name}", what) for what in ("title", "className") for name in PAGES],
        Input(ids.PLACE, "data"),
        Input(ids.TICK, "data"),  # a recording that grows gets content
        **LATER,
    )
    def dim_empty(place: Any, _: Any) -> Any:
        view = View.from_json(place)
        try:
            reasons = empty_pages(workspace, view) if place is not None else {}
        except MemprofError:
            reasons = {}  # every page says why
        found = [reasons.get(name, "") for name in PAGES]
        return [*found, *("is-empty" if reason else "" for reason in found)]

    @app.callback(
        Output(ids.TICK, "data"),
        Output(ids.BADGE, "children"),
        Output(ids.BADGE, "className"),
        Input(ids.LIVE, "n_intervals"),
        State(ids.TICK, "data"),
        State(ids.VIEW, "data"),
        State(ids.ZOOMED, "data"),
        State(ids.URL, "search"),
    )
    def look_again(_: Any, tick: Any, whole: Any, zoom: Any, search: Any) -> Any:
        is_followed = not _has_zoomed(zoom, whole) and follows(workspace, search, whole)
        for source in workspace.sources:
            if source.is_spool:
                try:
                    source.refresh()
                except MemprofError as error:
                    set_props(ids.NOTE, {"children": parts.note(str(error))})
        # The page in another tab may have had it reread: what counts is what this page has drawn.
        version = workspace.version
        has_grown = version != tick
        if has_grown and is_followed:  # nobody has zoomed or moved the cursor: the page follows the job
            set_props(ids.GO, {"data": {"first": -1, "end": -1, "at": -1, "count": f"live {version}"}})
        if has_grown and not any(source.is_growing for source in workspace.sources):
            # A finished recording has lost the .spool of its name.
            set_props(ids.RECORDINGS, {"children": recording_choices(workspace, View.from_json(whole))})
        return version if has_grown else no_update, *_badge(workspace)


def _badge(workspace: Workspace) -> tuple[str, str]:
    """Returns what the header says of recordings in progress, and the class of its element."""
    if any(source.is_growing for source in workspace.sources):
        return "● live", "badge is-live"
    if any(source.is_spool for source in workspace.sources):
        return UNFINISHED, "badge is-unfinished"
    return "recording finished" if workspace.version else "", "badge"


def follows(workspace: Workspace, search: Any, whole: Any) -> bool:
    """Whether the page follows a running job, since nobody has chosen a range or moved the cursor.

    Args:
        workspace: The open recordings.
        search: The address's query, which names a range or a cursor only once something was chosen.
        whole: The view, as the browser sends it.
    """
    asked = View.from_search(search)
    if max(asked.first, asked.at) < 0:
        return True
    view = View.from_json(whole)
    start = {"first": -1, "end": -1, "at": -1}
    return _resolved(workspace, view) == _resolved(workspace, view.change(**start))


def _panel(workspace: Workspace, view: View) -> Any:
    """Returns the components of the view's page; for an unknown one, a note and those of the default page."""
    page = PAGES.get(view.tab)
    if page is not None:
        return page.layout(workspace, view)
    default = View().tab
    names = ", ".join(PAGES)
    sentence = f"unknown page {view.tab!r}: give one of {names}. This is {default}."
    return [parts.note(sentence), PAGES[default].layout(workspace, view.change(tab=default))]


def _after(workspace: Workspace, view: View, name: str, what: str, value: Any) -> View:
    """Returns the view after something in the browser changed."""
    if value is None and name != ids.URL:
        return view
    if name == ids.URL:
        return View.from_search(value) if value != view.to_search() else view
    if name == ids.GO:
        return view.change(**{str(key): part for key, part in value.items()}) if isinstance(value, dict) else view
    if name in (ids.TRACE, ids.RANK) and value == getattr(view, name):
        return view
    if name == ids.TRACE:  # positions mean nothing in another recording
        return View(trace=view.trace, tab=view.tab, budget=view.budget).change(trace=value)
    if name == ids.RANK:
        return view.change(rank=value, first=-1, end=-1, at=-1, storage=-1)
    if name in _CONTROLS:
        return view.change(**{{ids.TABS: "tab"}.get(name, name): value})
    rank = workspace.rank(view.trace, view.rank)
    if name == ids.KEY and isinstance(value, dict):
        return on_key(view, rank, str(value.get("key")), is_shifted=bool(value.get("shift")))
    if what == "clickData" and isinstance(value, dict):
        return on_click(view, rank, value)
    return view


def _has_zoomed(zoom: Any, whole: Any) -> bool:
    """Whether the browser has zoomed since it got its view."""
    return isinstance(zoom, dict) and isinstance(whole, dict) and zoom.get("count") != whole.get("zoomed")


def _zoomed(workspace: Workspace, view: View, zoom: dict[str, Any]) -> View:
    """Returns the view with the range of a zoom; unchanged where that was of another recording or axis."""
    if (zoom.get("trace"), zoom.get("rank")) != (view.trace, view.rank):
        return view
    rank = workspace.rank(view.trace, view.rank)
    clock = clock_of(view, rank)
    return on_zoom(view, rank, zoom, clock) if zoom.get("axis") == ("ops" if clock is None else "time") else view


def _resolved(workspace: Workspace, view: View) -> View:
    """Returns the view with defaults filled in from the recording; unchanged where the recording is unreadable."""
    try:
        rank = workspace.rank(view.trace, view.rank)
        now = shown(view, rank)
    except MemprofError:
        return view
    if len(workspace.source(view.trace).trace.ranks) > 1:
        view = view.change(rank=rank.trace.rank)
    known = grouped(rank)
    if view.by not in known:
        view = view.change(by=next(iter(known)))
    return view.change(first=now.first, end=now.end, at=now.at)


def _print_error(error: Exception) -> None:
    """Prints the traceback of an internal error to memprof's stderr."""
    lines = "".join(traceback.format_exception(error))
    # It may contain names from a recording, and terminals interpret control characters.
    print("".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in lines), file=sys.stderr)
    set_props(
        ids.NOTE,
        {"children": parts.note("Internal error; see the terminal running memprof.")},
    )
