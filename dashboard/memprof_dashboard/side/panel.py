"""The panel at the cursor: its switches, and the callbacks that fill it."""

from __future__ import annotations

from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html, no_update

from memprof.units import format_bytes
from memprof_dashboard import ids, parts
from memprof_dashboard.figures.boxes import flame, treemap
from memprof_dashboard.figures.shared import message
from memprof_dashboard.page import LATER, theme_of, view_of
from memprof_dashboard.palette import fill_of
from memprof_dashboard.side.detail import detail_of
from memprof_dashboard.side.table import Order, chunk_of, table_of
from memprof_dashboard.sources import MemprofError, Rank, Workspace
from memprof_dashboard.state import View, shown
from memprof_dashboard.views.boxes import MOST_BOXES, Box, boxes_by_category, boxes_by_module, bytes_by_node
from memprof_dashboard.views.code_boxes import boxes_by_code
from memprof_dashboard.views.groups import storages_found

#: Ways to show what is alive, by the name that stands in the URL.
SHOWN = {"table": "Table", "flame": "Flame graph", "treemap": "Treemap"}
#: What it is grouped by; ``category`` is a way of pictures, the table's rows are of one category each.
GROUPED = {"module": "module", "line": "line", "stack": "stack", "category": "category"}

_TABLE = "live-table"
_DETAIL = "live-detail"
_CHUNK = "live-chunk"
_PICTURE = "live-picture"
_GRAPH = "boxes-graph"
_REMARK = "boxes-remark"
_ABOVE = "boxes-above"
_AS_TABLE = "boxes-table"
_MOST_ROWS = 200
#: Groupings whose boxes are frames or lines of code.
_OF_CODE = ("line", "stack")


def grouped(rank: Rank) -> dict[str, str]:
    """Returns the ways to group what is alive that a recording has the names for, the first one by default."""
    lacks = {"module"} if not rank.has_modules else set()
    lacks |= set() if rank.has_stacks else {"line", "stack"}
    return {name: text for name, text in GROUPED.items() if name not in lacks}


class SidePanel:
    """What is alive at the cursor."""

    def __init__(self, editor: str) -> None:
        """Stores the address that opens a source line, as in ``side.editor``."""
        self._editor = editor

    def layout(self) -> html.Section:
        """Returns the panel, which follows the cursor."""
        labelled: Any = {"aria-label": "alive at the cursor"}
        return html.Section(
            [
                html.H2("Alive at the cursor", className="unseen"),
                html.Div(id=ids.READOUT, className="readout", role="status"),
                html.Div(
                    [parts.switch(ids.SIDE, SHOWN, "shown as"), parts.switch(ids.BY, GROUPED, "grouped by")],
                    className="switches",
                ),
                html.Div(id=_DETAIL, className="detail"),
                dcc.Store(id=ids.MORE),
                dcc.Store(id=_CHUNK),
                html.Div(id=_TABLE, className="side-table"),
                html.Div(
                    [
                        html.Div(id=_ABOVE, className="above"),
                        parts.graph(_GRAPH, has_bar=False, className="boxes"),
                        html.Div(id=_REMARK),
                        html.Div(id=_AS_TABLE),
                    ],
                    id=_PICTURE,
                    className="picture",
                    style={"display": "none"},
                ),
            ],
            className="side",
            **labelled,
        )

    def register(self, app: Dash, workspace: Workspace) -> None:
        """Registers the callbacks."""

        @app.callback(Output(_DETAIL, "children"), Output(_TABLE, "children"), Input(ids.CURSOR, "data"), **LATER)
        def fill(cursor: Any) -> Any:
            view = view_of(cursor)
            try:
                rank = workspace.rank(view.trace, view.rank)
                detail = detail_of(rank, view, self._editor)
                is_table = detail is None and view.side not in ("flame", "treemap")
                return detail, table_of(rank, view) if is_table else None
            except MemprofError as error:
                return None, parts.error(str(error))

        @app.callback(Output(_CHUNK, "data"), Input(ids.MORE, "data"), State(ids.CURSOR, "data"))
        def fetch(more: Any, cursor: Any) -> Any:
            if not isinstance(more, dict) or cursor is None:
                return no_update
            view = View.from_json(cursor)
            rank = workspace.rank(view.trace, view.rank)
            first, column = (more.get(name) for name in ("first", "column"))
            if type(first) is not int or not 0 <= first < len(rank.history.size):
                return no_update
            order = Order(column if type(column) is int else 0, is_up=more.get("up") is True)
            return chunk_of(rank, view, first, order)

        # In the browser: appends the rows to the table, if it still is the one they were fetched for.
        app.clientside_callback(  # type: ignore[no-untyped-call]  # dash has no types for it
            ClientsideFunction("memprof", "append"), Output(_CHUNK, "clear_data"), Input(_CHUNK, "data")
        )

        @app.callback(Output(ids.BY, "options"), Input(ids.PLACE, "data"), **LATER)
        def offer(place: Any) -> Any:
            view = View.from_json(place)
            try:
                shown_by = grouped(workspace.rank(view.trace, view.rank)) if place is not None else GROUPED
            except MemprofError:
                return no_update
            return [{"label": text, "value": name} for name, text in shown_by.items()]

        @app.callback(
            Output(_PICTURE, "style"),
            Output(_GRAPH, "figure"),
            Output(_ABOVE, "children"),
            Output(_REMARK, "children"),
            Output(_AS_TABLE, "children"),
            Input(ids.CURSOR, "data"),
            Input(ids.THEME, "data"),
        )
        def draw(cursor: Any, theme: Any) -> Any:
            view = View.from_json(cursor)
            if cursor is None or view.side not in ("flame", "treemap") or view.storage >= 0:
                return {"display": "none"}, *[no_update] * 4
            try:
                rank = workspace.rank(view.trace, view.rank)
                if not rank.history.ops:
                    return {}, message("No operators were recorded.", theme_of(theme)), None, None, None
                at = shown(view, rank).at
                boxes = self._boxes(rank, at, view)
            except MemprofError as error:
                return {}, message("Cannot draw this chart.", theme_of(theme)), None, parts.error(str(error)), None
            figure = (flame if view.side == "flame" else treemap)(boxes, theme_of(theme), view.find)
            return {}, figure, _above(rank, at, view), _remark(rank, at, boxes), _table(boxes)

    def _boxes(self, rank: Rank, at: int, view: View) -> list[Box]:
        if view.by in _OF_CODE:
            return boxes_by_code(rank, at, by_stack=view.by == "stack", is_inverted=_is_inverted(view))
        tree = rank.tree
        by_node = bytes_by_node(rank.history, tree, at)
        if view.by == "category":
            return boxes_by_category(by_node, tree, {name: fill_of(name).label for name in by_node})
        return boxes_by_module(by_node, tree)


def _is_inverted(view: View) -> bool:
    return view.side == "flame" and view.inverted == 1


def _above(rank: Rank, at: int, view: View) -> list[Any]:
    """Returns the button that turns a flame graph of code around, and the share of what matches the search."""
    made: list[Any] = []
    if view.side == "flame" and view.by in _OF_CODE:
        is_inverted = _is_inverted(view)
        label, title = ("callers first", "outermost frames on top") if is_inverted else ("invert", "operators on top")
        made.append(parts.jump(label, title=title, inverted=int(not is_inverted)))
    found = storages_found(rank, view.find)
    if found is not None:
        rows, total = rank.history.alive(at), max(int(rank.history.total[at]), 1)
        size = int(rank.history.size[rows[found[rows]]].sum())
        made.append(html.Span(f"{format_bytes(size)} match, {size / total:.1%}"))
    return made


def _remark(rank: Rank, at: int, boxes: list[Box]) -> Any:
    total, summed = int(rank.history.total[at]), boxes[0].size
    remark = f"{summed:,} B"
    if summed != total:
        remark += f", of which operator {at:,} freed {format_bytes(summed - total)} before it allocated any"
    cut = f"; the {MOST_BOXES} largest boxes" if len(boxes) > MOST_BOXES else ""
    return parts.note(f"{remark}{cut}. Color: dominant category. Click a box to zoom in, the bar above to zoom out.")


def _table(boxes: list[Box]) -> Any:
    total = max(boxes[0].size, 1)
    order = sorted(range(1, len(boxes)), key=lambda place: -boxes[place].size)[:_MOST_ROWS]
    rows = [
        [
            parts.name(_path(boxes, place)),
            f"{boxes[place].size:,}",
            f"{boxes[place].size / total:.1%}",
            fill_of(boxes[place].category).label,
        ]
        for place in order
    ]
    return parts.as_table(["box", ">bytes", ">share", "dominant category"], rows, label="boxes")


def _path(boxes: list[Box], place: int) -> str:
    """Returns the labels from the outermost box to one."""
    labels: list[str] = []
    while boxes[place].parent >= 0:
        labels.append(boxes[place].label)
        place = boxes[place].parent
    return " / ".join(reversed(labels))
