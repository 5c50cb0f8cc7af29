"""Live storages at the cursor, largest first: allocation stack, what keeps each alive, and since when."""

from __future__ import annotations

from typing import Any

import numpy as np
from dash import Dash, Input, Output, html, no_update

from memprof.trace.schema import NONE, Ints, Saved
from memprof.units import format_bytes
from memprof_dashboard import ids, parts
from memprof_dashboard.page import or_sentence
from memprof_dashboard.palette import fill_of
from memprof_dashboard.sources import Rank, Workspace
from memprof_dashboard.state import View
from memprof_dashboard.views.reactions import shown
from memprof_dashboard.views.search import storages_found

_TABLE = "live-table"
_DETAIL = "live-detail"
_MOST_ROWS = 60


class Live:
    """The table of live storages, and the details of the selected one."""

    TITLE = "Live at the cursor"

    def layout(self, workspace: Workspace, view: View) -> Any:
        """Returns the two halves, which follow the cursor."""
        return html.Div([html.Div(id=_TABLE), html.Aside(id=_DETAIL)], className="halves")

    def register(self, app: Dash, workspace: Workspace) -> None:
        """Registers the callbacks."""

        @app.callback(Output(_TABLE, "children"), Input(ids.CURSOR, "data"))
        @or_sentence
        def fill(cursor: Any) -> Any:
            if cursor is None:
                return no_update
            view = View.from_json(cursor)
            return _table(workspace.rank(view.trace, view.rank), view)

        @app.callback(Output(_DETAIL, "children"), Input(ids.CURSOR, "data"))
        @or_sentence
        def show_detail(cursor: Any) -> Any:
            if cursor is None:
                return no_update
            view = View.from_json(cursor)
            return _detail(workspace.rank(view.trace, view.rank), view)


def _table(rank: Rank, view: View) -> Any:
    history = rank.history
    if not history.ops:
        return parts.empty("Nothing recorded", "The recording contains no operators.")
    at = shown(view, rank).at
    rows = history.alive(at)
    found = storages_found(rank, view.find)
    if found is not None:
        rows = rows[found[rows]]
    total = int(history.size[rows].sum())
    largest = rows[_largest(history.size[rows], _MOST_ROWS)]
    if not len(largest):
        what = f"No live storage matches {view.find!r}." if view.find else "No storage is live here."
        return parts.empty("No live storages", what)
    workspace = history.workspace(at) if found is None else 0
    remark = f"{len(rows):,} storage{'s' if len(rows) > 1 else ''}, {format_bytes(total)}"
    if len(rows) > len(largest):
        rest = total - int(history.size[largest].sum())
        remark += f" (the {len(largest)} largest are listed; remaining: {format_bytes(rest)})"
    if workspace:
        remark += f", and {format_bytes(workspace)} of kernel workspace"
    body = [_row(rank, int(row), at, is_chosen=int(row) == view.storage) for row in largest]
    return [
        parts.note(f"{remark}."),
        parts.table([">size", "name", "module", "allocated by", ">age", "shape"], body, label="live at the cursor"),
    ]


def _largest(sizes: Ints, most: int) -> Ints:
    """Returns the places of the largest, the largest first; of equal ones the older first."""
    places = np.arange(len(sizes)) if len(sizes) <= most else np.argpartition(-sizes, most - 1)[:most]
    ordered: Ints = places[np.lexsort((places, -sizes[places]))]
    return ordered


def _row(rank: Rank, row: int, at: int, *, is_chosen: bool) -> html.Tr:
    history = rank.history
    category = history.storage_categories[history.category[row]]
    created = int(history.created[row])
    name = str(rank.storage_texts["name"][row])
    shape, dtype = str(rank.storage_texts["shape"][row]), str(rank.storage_texts["dtype"][row])
    made = str(rank.op_names[created]) if created != NONE else "before recording"
    size = format_bytes(int(history.size[row]))
    return html.Tr(
        [
            html.Td(parts.jump(size, title=f"{int(history.size[row]):,} bytes", storage=row), className="number"),
            html.Td([_swatch(category), parts.name(name or fill_of(category).label, 48)]),
            html.Td(parts.name(rank.module_title(int(history.owner[row])), 40)),
            html.Td(parts.name(made, 36)),
            html.Td("" if created == NONE else f"{at - created:,}", className="number"),
            html.Td(f"{shape} {dtype}".strip()),
        ],
        className="chosen" if is_chosen else None,
    )


def _swatch(category: str) -> html.Span:
    fill = fill_of(category)
    return html.Span(className="swatch", style={"background": fill.colour}, title=fill.label)


def _detail(rank: Rank, view: View) -> Any:
    history = rank.history
    row = view.storage
    if not 0 <= row < len(history.size):
        return parts.empty(
            "Storage details", "Select a row to see its allocation stack, why it is alive and when it is freed."
        )
    created, freed = int(history.created[row]), int(history.freed[row])
    category = history.storage_categories[history.category[row]]
    first = max(created, 0)
    end = history.ops if freed == NONE else freed + 1
    margin = max((end - first) // 10, 2)
    facts = [
        ("size", f"{format_bytes(int(history.size[row]))} ({int(history.size[row]):,} bytes)"),
        ("category", fill_of(category).label),
        ("name", str(rank.storage_texts["name"][row])),
        ("module", rank.module_title(int(history.owner[row]))),
        ("tensor", f"{rank.storage_texts['shape'][row]} {rank.storage_texts['dtype'][row]}".strip()),
        ("device", str(rank.storage_texts["device"][row])),
        ("allocated by", _operator(rank, created) if created != NONE else "before recording"),
        ("freed after", _operator(rank, freed) if freed != NONE else "not freed while recording"),
        ("why alive", _why(rank, row, category)),
    ]
    return [
        html.H3(["Storage ", html.Span(f"{row:,}")]),
        html.Dl([part for label, text in facts if text for part in (html.Dt(label), html.Dd(parts.name(text, 160)))]),
        parts.jump("zoom to its lifetime", first=max(first - margin, 0), end=min(end + margin, history.ops)),
        *_stack(rank, created),
    ]


def _operator(rank: Rank, op_id: int) -> str:
    history = rank.history
    module = rank.module_title(int(history.module[op_id]))
    phase = history.phases[history.phase[op_id]] or "other"
    return (
        f"{rank.op_names[op_id]} (operator {op_id:,}, {phase} of step {history.step[op_id]}{module and f', {module}'})"
    )


def _why(rank: Rank, row: int, category: str) -> str:
    """Returns what keeps a storage alive."""
    saved = rank.trace.table(Saved)
    uses = np.flatnonzero(saved.storage_id == row)
    if len(uses):
        last = int(saved.released_op_id[uses].max())
        maker = _operator(rank, int(saved.forward_op_id[uses[0]]))
        until = f" until {_operator(rank, last)}" if last != NONE else ""
        more = f" and {len(uses) - 1} more" if len(uses) > 1 else ""
        return f"saved for the backward of {maker}{more}{until}"
    return {
        "parameter": "parameter: alive as long as the model",
        "buffer": "buffer: alive as long as the model",
        "optimizer_state": "optimizer state: alive as long as the optimizer",
        "gradient": "gradient: alive until zero_grad sets it to None",
        "input": "input: the script references the batch, or a tensor derived from it",
    }.get(category, "still referenced: by the script, or for a later operator")


def _stack(rank: Rank, op_id: int) -> list[Any]:
    if op_id == NONE:
        return []
    stack = int(rank.op_stacks[op_id])
    if stack == NONE:
        return [parts.note("No Python stack was captured.")]
    own = {f"{line.file}:{line.line}:{line.function}" for line in rank.sources.user_frames[stack]}
    frames = str(rank.stacks.frames[stack]).splitlines()
    shown_frames = [
        html.Li(parts.name(frame, 140), className="own" if frame in own and len(own) < len(frames) else None)
        for frame in frames[:60]
    ]
    return [html.H4("Python stack, innermost first"), html.Ol(shown_frames, className="stack")]
