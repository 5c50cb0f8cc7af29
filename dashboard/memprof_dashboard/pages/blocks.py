"""Tensors that outlive their last use: a rectangle each, from allocation to free, lighter after the last use."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from dash import ALL, Dash, Input, Output, Patch, State, ctx, dcc, html, no_update

from memprof.trace.schema import NONE
from memprof_dashboard import ids, parts
from memprof_dashboard.figures.blocks import Rectangles, blocks, chosen_frame
from memprof_dashboard.figures.shared import message
from memprof_dashboard.figures.timeline_marks import cursor_line
from memprof_dashboard.page import or_message, or_sentence, theme_of, view_of
from memprof_dashboard.sources import MemprofError, Rank, Workspace
from memprof_dashboard.state import View, on_zoom, shown
from memprof_dashboard.views.block_texts import (
    blocks_table,
    drawn_sentence,
    hover_text,
    placed_sentence,
    storage_line,
    waste_table,
)
from memprof_dashboard.views.groups import storages_found
from memprof_dashboard.views.storage_lives import (
    Blocks,
    IdleStorages,
    StorageLives,
    choose_blocks,
    cut_stretch,
    find_idle,
)

_GRAPH = "blocks-graph"
_REMARK = "blocks-remark"
_CHOSEN = "blocks-chosen"
_WASTERS = "blocks-wasters"
_AS_TABLE = "blocks-table"
_ROW = "blocks-row"
_DETAILS = "blocks-story"
_IS_DRAWN = "blocks-is-drawn"
#: First operator, the one behind the last, and what is searched for.
_Key = tuple[int, int, str]


class BlocksPage:
    """The plot of lives, and below it those held longest after their last use."""

    TITLE = "Lifetimes"

    def __init__(self) -> None:
        self._lives: weakref.WeakKeyDictionary[Rank, StorageLives] = weakref.WeakKeyDictionary()
        self._last: weakref.WeakKeyDictionary[Rank, tuple[_Key, tuple[Blocks, IdleStorages]]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()

    def lives(self, rank: Rank) -> StorageLives:
        """Returns the lifetimes of a recording's storages; cached as long as the recording is open."""
        with self._lock:
            if rank not in self._lives:
                self._lives[rank] = StorageLives(rank.trace, rank.history)
            return self._lives[rank]

    def layout(self, workspace: Workspace, view: View) -> Any:
        """Returns the plot, which follows the window, and what stands below it."""
        return html.Div(
            [
                html.Div(id=_REMARK),
                dcc.Store(id=_IS_DRAWN, data=False),
                parts.graph(_GRAPH, "var(--blocks-height)"),
                html.Div(id=_AS_TABLE),
                html.Div(id=_CHOSEN),
                html.Div(id=_WASTERS),
            ]
        )

    def register(self, app: Dash, workspace: Workspace) -> None:
        """Registers the callbacks."""

        @app.callback(
            Output(_GRAPH, "figure"),
            Output(_IS_DRAWN, "data"),
            Input(ids.WINDOW, "data"),
            Input(ids.THEME, "data"),
            State(ids.VIEW, "data"),
        )
        def draw(window: Any, theme: Any, whole: Any) -> Any:
            view = view_of(window)
            now = View.from_json(whole)
            figure = or_message(self._figure)(workspace, view, now.at, now.storage, theme)
            return figure, len(figure.layout.shapes) > 0  # a message figure has no cursor to move

        @app.callback(
            Output(_REMARK, "children"),
            Output(_WASTERS, "children"),
            Output(_AS_TABLE, "children"),
            Input(ids.WINDOW, "data"),
        )
        def describe_window(window: Any) -> Any:
            try:
                return self._texts(workspace, view_of(window))
            except MemprofError as error:
                return parts.error(str(error)), None, None

        @app.callback(
            Output(_GRAPH, "figure", allow_duplicate=True),
            Input(ids.CURSOR, "data"),
            State(ids.THEME, "data"),
            State(_IS_DRAWN, "data"),
            prevent_initial_call=True,
        )
        def move_cursor(cursor: Any, theme: Any, is_drawn: Any) -> Any:
            if cursor is None or not is_drawn:
                return no_update
            view = View.from_json(cursor)
            rank = workspace.rank(view.trace, view.rank)
            if not rank.history.ops:
                return no_update
            chosen = self._seen(rank, view)[0]
            patch = Patch()
            patch["layout"]["shapes"][0] = cursor_line(view.at + 0.5, theme_of(theme))
            box = _rectangles(rank, self.lives(rank), chosen, with_texts=False).box(view.storage)
            patch["layout"]["shapes"][1] = chosen_frame(box, chosen.top, theme_of(theme))
            return patch

        @app.callback(Output(_CHOSEN, "children"), Input(ids.CURSOR, "data"))
        @or_sentence
        def show_chosen(cursor: Any) -> Any:
            view = view_of(cursor)
            rank = workspace.rank(view.trace, view.rank)
            if not 0 <= view.storage < len(rank.history.size):
                return parts.note("Click a rectangle to see its owner and its lifetime.")
            details = html.Button("show details", id={"type": _DETAILS, "row": view.storage}, type="button")
            return html.P([*storage_line(rank, self.lives(rank), view.storage), details])

        @app.callback(
            Output(ids.GO, "data", allow_duplicate=True),
            Input(_GRAPH, "clickData"),
            Input(_GRAPH, "relayoutData"),
            Input({"type": _ROW, "row": ALL}, "n_clicks"),
            Input({"type": _DETAILS, "row": ALL}, "n_clicks"),
            State(ids.VIEW, "data"),
            prevent_initial_call=True,
        )
        def go(click: Any, relayout: Any, rows: Any, details: Any, whole: Any) -> Any:
            if not ctx.triggered or not ctx.triggered[0]["value"]:
                return no_update
            view, name = View.from_json(whole), ctx.triggered_id
            rank = workspace.rank(view.trace, view.rank)
            if name == _GRAPH:
                if ctx.triggered[0]["prop_id"].endswith("relayoutData"):
                    zoomed = on_zoom(view, rank, relayout) if isinstance(relayout, dict) else view
                    return no_update if zoomed == view else {"first": zoomed.first, "end": zoomed.end}
                return _jump(rank, view, _clicked(click))
            if name["type"] == _DETAILS:
                return {"tab": "live", "storage": name["row"]}
            return _jump(rank, view, name["row"])

    def _figure(self, workspace: Workspace, view: View, at: int, storage: int, theme: Any) -> Any:
        rank = workspace.rank(view.trace, view.rank)
        if not rank.history.ops:
            return message("No operators were recorded.", theme_of(theme))
        now, chosen = shown(view, rank), self._seen(rank, view)[0]
        drawn = _rectangles(rank, self.lives(rank), chosen)
        return blocks(drawn, now.first, now.end, at if at >= 0 else now.at, theme_of(theme), storage)

    def _texts(self, workspace: Workspace, view: View) -> tuple[Any, Any, Any]:
        rank = workspace.rank(view.trace, view.rank)
        if not rank.history.ops:
            return parts.empty("Nothing recorded", "The recording contains no operators, hence no tensors."), None, None
        lives, (chosen, idle) = self.lives(rank), self._seen(rank, view)
        remark = html.P([drawn_sentence(chosen, view.find), " ", placed_sentence(chosen)], className="note")
        return remark, waste_table(rank, lives, idle, _ROW), blocks_table(rank, lives, chosen)

    def _seen(self, rank: Rank, view: View) -> tuple[Blocks, IdleStorages]:
        """Returns the blocks drawn and listed for a view; the last result is cached, as two callbacks use it."""
        now, lives = shown(view, rank), self.lives(rank)
        key = (now.first, now.end, view.find)
        with self._lock:
            if rank not in self._last or self._last[rank][0] != key:
                stretch = cut_stretch(lives, now.first, now.end, storages_found(rank, view.find))
                self._last[rank] = key, (choose_blocks(stretch), find_idle(stretch))
            return self._last[rank][1]


def _clicked(click: Any) -> int:
    """Returns the storage whose rectangle was clicked; NONE where there is none."""
    try:
        row = click["points"][0]["customdata"]
    except (KeyError, IndexError, TypeError):
        return NONE
    return row if type(row) is int else NONE


def _jump(rank: Rank, view: View, row: int) -> Any:
    """Selects a storage; moves the cursor to its allocation where it is not alive at the cursor."""
    history = rank.history
    if not 0 <= row < len(history.size):
        return no_update
    at, created, freed = shown(view, rank).at, int(history.created[row]), int(history.freed[row])
    if created <= at and (freed == NONE or at <= freed):
        return {"storage": row}
    return {"storage": row, "at": max(created, 0)}


def _rectangles(rank: Rank, lives: StorageLives, chosen: Blocks, *, with_texts: bool = True) -> Rectangles:
    history, rows = rank.history, chosen.rows
    return Rectangles(
        rows=rows,
        left=history.created[rows].clip(0),
        right=lives.right[rows],
        idle=lives.idle[rows],
        y=chosen.y,
        size=history.size[rows],
        category=[history.storage_categories[code] for code in history.category[rows].tolist()],
        text=[hover_text(rank, row) for row in rows.tolist()] if with_texts else [],
        floor=chosen.floor,
        top=chosen.top,
    )
