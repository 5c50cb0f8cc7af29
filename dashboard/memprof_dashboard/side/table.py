"""The table of live storages at the cursor: like ones share a row, the largest first."""

from __future__ import annotations

from typing import Any

from dash import html

from memprof.analysis.report.module_tree import ModuleTree
from memprof.units import format_bytes
from memprof_dashboard import parts
from memprof_dashboard.palette import fill_of
from memprof_dashboard.sources import Rank
from memprof_dashboard.state import View
from memprof_dashboard.views.groups import Group, group_alike
from memprof_dashboard.views.reactions import shown
from memprof_dashboard.views.search import storages_found

#: Most rows; the storages beyond them are summed in the remark.
MOST_ROWS = 80
_HEADS = {"module": "module", "line": "allocated by", "stack": "stack, innermost last"}


def table_of(rank: Rank, tree: ModuleTree, view: View) -> Any:
    """Returns the table and a remark on what it leaves out.

    Args:
        rank: The recording.
        tree: Its modules, repeated layers folded.
        view: The view; its search filters the rows.
    """
    history = rank.history
    if not history.ops:
        return parts.empty("Nothing recorded", "The recording contains no operators.")
    at = shown(view, rank).at
    rows = history.alive(at)
    found = storages_found(rank, view.find)
    if found is not None:
        rows = rows[found[rows]]
    if not len(rows):
        what = f"No live storage matches {view.find!r}." if view.find else "No storage is live here."
        return parts.empty("No live storages", what)
    total = int(history.size[rows].sum())
    by = view.by if view.by in _HEADS else "module"
    groups = group_alike(rank, tree, rows, by, MOST_ROWS)
    rest = total - sum(group.size for group in groups)
    workspace = history.workspace(at) if found is None else 0
    remark = f"{len(rows):,} storage{'s' if len(rows) > 1 else ''}, {format_bytes(total)}"
    if rest:
        remark += f" (not listed: {format_bytes(rest)})"
    if workspace:
        remark += f", and {format_bytes(workspace)} of kernel workspace"
    heads = [">size", _HEADS[by], ">count", "" if by == "line" else "source"]
    most = groups[0].size
    body = [_row(group, most, by, is_chosen=view.storage in group.rows) for group in groups]
    return [
        parts.table([head for head in heads if head], body, label="live at the cursor", kind="table fills"),
        parts.note(f"{remark}."),
    ]


def _row(group: Group, most: int, by: str, *, is_chosen: bool) -> html.Tr:
    fill = fill_of(group.category)
    count = len(group.rows)
    each = group.size // count
    exact = f"{group.size:,} bytes"
    below = " · ".join(part for part in (fill.label, group.tensor, group.operator.removesuffix(".default")) if part)
    sort: Any = {"data-sort": str(group.size)}
    times: Any = {"data-sort": str(count)}
    bar = html.Span(className="share", style={"width": f"{100 * group.size / max(most, 1):.1f}%"})
    name = parts.jump(group.title, title=f"{fill.label}: {group.title}", storage=int(group.rows[0]))
    cells = [
        html.Td([html.Span(format_bytes(group.size), title=exact), bar], className="number", **sort),
        html.Td(
            [
                html.Span(className="swatch", style={"background": fill.colour}, title=fill.label),
                name,
                html.Div(below, className="below name", title=below[:400]),
            ]
        ),
        html.Td(f"{count:,} x {format_bytes(each)}" if count > 1 else "1", className="number", **times),
    ]
    if by != "line":
        cells.append(html.Td(parts.name(group.source, 30), className="source"))
    return html.Tr(cells, className="chosen" if is_chosen else None)
