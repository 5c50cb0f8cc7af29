"""Live bytes by module at the cursor: boxes that sum to the total."""

from __future__ import annotations

import weakref
from typing import Any

from dash import Dash, Input, Output, State, ctx, dcc, html, no_update

from memprof.analysis.report.module_tree import ModuleTree, folded_tree
from memprof.trace.schema import NONE
from memprof.units import format_bytes
from memprof_dashboard import ids, parts
from memprof_dashboard.figures.shared import CONFIG, message
from memprof_dashboard.figures.treemap import treemap
from memprof_dashboard.page import theme_of
from memprof_dashboard.palette import FILLS, fill_of
from memprof_dashboard.sources import MemprofError, Rank, Workspace
from memprof_dashboard.state import View
from memprof_dashboard.views.boxes import MOST_BOXES, OUTSIDE, Box, boxes_by_category, boxes_by_module, bytes_by_node
from memprof_dashboard.views.reactions import shown

_GRAPH = "treemap-graph"
_SPLIT = "treemap-split"
#: The box that was clicked; see assets/treemap.js.
_CLICKED = "treemap-clicked"
_REMARK = "treemap-remark"
_AS_TABLE = "treemap-table"
_BY_MODULE, _BY_CATEGORY = "module", "category"
_MOST_ROWS = 200


class TreemapPage:
    """The treemap of modules, and the selector of its breakdown."""

    TITLE = "By module"

    def __init__(self) -> None:
        """Starts without a recording."""
        self._trees: weakref.WeakKeyDictionary[Rank, ModuleTree] = weakref.WeakKeyDictionary()

    def layout(self, workspace: Workspace, view: View) -> Any:
        """Returns the selector and the treemap, which follows the cursor."""
        return html.Div(
            [
                html.Div(
                    [
                        dcc.RadioItems(
                            [
                                {"label": "by module", "value": _BY_MODULE},
                                {"label": "by category, then module", "value": _BY_CATEGORY},
                            ],
                            _BY_MODULE,
                            id=_SPLIT,
                            inline=True,
                            persistence=True,
                            persistence_type="session",
                        ),
                        html.Div(id=_REMARK),
                    ],
                    className="treemap-head",
                ),
                dcc.Store(id=_CLICKED),
                dcc.Graph(id=_GRAPH, config=CONFIG, responsive=True, style={"height": "var(--treemap-height)"}),
                html.Div(id=_AS_TABLE),
            ]
        )

    def register(self, app: Dash, workspace: Workspace) -> None:
        """Registers the callbacks."""

        @app.callback(
            Output(_GRAPH, "figure"),
            Output(_REMARK, "children"),
            Output(_AS_TABLE, "children"),
            Input(ids.CURSOR, "data"),
            Input(ids.THEME, "data"),
            Input(_SPLIT, "value"),
        )
        def fill(cursor: Any, theme: Any, split: Any) -> Any:
            if cursor is None:
                return no_update, no_update, no_update
            view = View.from_json(cursor)
            try:
                rank = workspace.rank(view.trace, view.rank)
                if not rank.history.ops:
                    nothing = parts.empty("Nothing recorded", "The recording contains no operators.")
                    return message("No operators were recorded.", theme_of(theme)), nothing, None
                at = shown(view, rank).at
                boxes = self._boxes(rank, at, split)
            except MemprofError as error:
                return message("Cannot draw this chart.", theme_of(theme)), parts.error(str(error)), None
            return treemap(boxes, theme_of(theme), view.find), _remark(rank, at, boxes), _table(boxes)

        @app.callback(
            Output(ids.GO, "data", allow_duplicate=True),
            Input(_CLICKED, "data"),
            State(ids.CURSOR, "data"),
            State(_SPLIT, "value"),
            prevent_initial_call=True,
        )
        def go(click: Any, cursor: Any, split: Any) -> Any:
            if not ctx.triggered or cursor is None:
                return no_update
            view = View.from_json(cursor)
            rank = workspace.rank(view.trace, view.rank)
            if not rank.history.ops:
                return no_update
            return _search(click, self._boxes(rank, shown(view, rank).at, split), view.find)

    def _boxes(self, rank: Rank, at: int, split: Any) -> list[Box]:
        if rank not in self._trees:
            self._trees[rank] = folded_tree(rank.modules)
        tree = self._trees[rank]
        by_node = bytes_by_node(rank.history, tree, at)
        if split == _BY_CATEGORY:
            return boxes_by_category(by_node, tree, {name: fill_of(name).label for name in by_node})
        return boxes_by_module(by_node, tree)


def _search(click: Any, boxes: list[Box], find: str) -> Any:
    """Searches for the module whose box was clicked; a second click ends the search."""
    try:
        place = int(click["id"])
    except (KeyError, TypeError, ValueError):
        return no_update
    if not 0 <= place < len(boxes) or not boxes[place].find:
        return no_update
    wanted = boxes[place].find
    return {"find": "" if wanted == find else wanted}


def _remark(rank: Rank, at: int, boxes: list[Box]) -> Any:
    leaves = _leaves(boxes)
    total, summed = int(rank.history.total[at]), sum(boxes[place].size for place in leaves)
    compared = f"{summed:,} B, exactly the live bytes during operator {at:,}"
    if summed != total:
        compared = (
            f"{summed:,} B, of which operator {at:,} freed {format_bytes(summed - total)} before it allocated any"
        )
    outside = sum(box.size for box in boxes if box.label == OUTSIDE and not box.modules)
    of_none = f"; {format_bytes(outside)} outside any module" if outside else ""
    cut = f". Only the {MOST_BOXES} largest modules have their own box" if len(boxes) > MOST_BOXES else ""
    remark = f"The {len(leaves):,} boxes sum to {compared}{of_none}{cut}. Click one to search for its module."
    return html.Div([html.P(remark, className="note"), _legend(boxes, leaves)])


def _legend(boxes: list[Box], leaves: list[int]) -> Any:
    """Returns the colour legend."""
    present = {boxes[place].category for place in leaves}
    ordered = [*(name for name in FILLS if name in present), *sorted(present - FILLS.keys())]
    return html.P(
        [
            "color = dominant category: ",
            *(
                html.Span(
                    [
                        html.Span(className="swatch", style={"background": fill_of(name).colour}),
                        parts.name(fill_of(name).label, 40),
                    ],
                    className="treemap-key",
                )
                for name in ordered
            ),
        ],
        className="note",
    )


def _leaves(boxes: list[Box]) -> list[int]:
    around = {box.parent for box in boxes}
    return [place for place in range(len(boxes)) if place not in around]


def _table(boxes: list[Box]) -> Any:
    total = max(boxes[0].size, 1)
    order = sorted(range(1, len(boxes)), key=lambda place: -boxes[place].size)[:_MOST_ROWS]
    rows = [
        [
            parts.name(_path(boxes, place)),
            f"{boxes[place].size:,}",
            f"{boxes[place].size / total:.1%}",
            fill_of(boxes[place].category).label,
            boxes[place].modules or "",
        ]
        for place in order
    ]
    return parts.as_table(["box", ">bytes", ">share", "dominant category", ">modules"], rows, label="boxes")


def _path(boxes: list[Box], place: int) -> str:
    """Returns the labels from the outermost box to one."""
    labels: list[str] = []
    while boxes[place].parent != NONE:
        labels.append(boxes[place].label)
        place = boxes[place].parent
    return " / ".join(reversed(labels))
