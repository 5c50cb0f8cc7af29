"""The table of live storages at the cursor: like ones share a row, the largest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dash import html

from memprof.trace.schema import Ints
from memprof.units import format_bytes
from memprof_dashboard import parts
from memprof_dashboard.palette import fill_of
from memprof_dashboard.rank import Rank
from memprof_dashboard.side.detail import source_text
from memprof_dashboard.state import View, shown
from memprof_dashboard.views.boxes import OUTSIDE
from memprof_dashboard.views.groups import BEFORE, Group, group_alike, storages_found

#: Rows sent at once: the browser asks for more as the table is scrolled.
CHUNK = 80
_HEADS = {"module": "module", "line": "allocated by", "stack": "stack, innermost last"}


@dataclass(frozen=True)
class Order:
    """What rows are sorted by.

    Attributes:
        column: Place of the column.
        is_up: The least first.
    """

    column: int = 0
    is_up: bool = False


def table_of(rank: Rank, view: View) -> Any:
    """Returns the first rows of the table, and a remark on all of them.

    Args:
        rank: The recording.
        view: The view; its search filters the rows.
    """
    history = rank.history
    if not history.ops:
        return parts.empty("Nothing recorded", "The recording contains no operators.")
    rows = _rows(rank, view)
    if not len(rows):
        what = f"No live storage matches {view.find!r}." if view.find else "No storage is live here."
        return parts.empty("No live storages", what)
    remark = f"{len(rows):,} storage{'s' if len(rows) > 1 else ''}, {format_bytes(int(history.size[rows].sum()))}"
    workspace = 0 if view.find.strip() else history.workspace(shown(view, rank).at)
    if workspace:
        remark += f", and {format_bytes(workspace)} of kernel workspace"
    name = _HEADS[_by(view)] if rank.has_modules or _by(view) != "module" else _HEADS["line"]
    heads = [">size", name, ">count", "source" if _has_source(rank, view) else ""]
    body, has_more = _body(rank, view, rows, 0, Order())
    more: Any = {"data-key": _key(rank, view), "data-more": "yes" if has_more else "no"}
    return [
        parts.table([head for head in heads if head], body, label="live at the cursor", kind="table fills", **more),
        parts.note(f"{remark}."),
    ]


def chunk_of(rank: Rank, view: View, first: int, order: Order) -> dict[str, Any]:
    """Returns more rows, as ``parts.table`` sends them."""
    body, has_more = _body(rank, view, _rows(rank, view), first, order)
    return {"key": _key(rank, view), "first": first, "more": has_more, "rows": [parts.plain(row) for row in body]}


def _key(rank: Rank, view: View) -> str:
    """Returns what tells the table of a view from others."""
    return f"{view.trace} {rank.trace.rank} {shown(view, rank).at} {_by(view)} {view.find}"


def _by(view: View) -> str:
    return view.by if view.by in _HEADS else "module"


def _has_source(rank: Rank, view: View) -> bool:
    return _by(view) != "line" and rank.has_stacks


def _rows(rank: Rank, view: View) -> Ints:
    rows = rank.history.alive(shown(view, rank).at)
    found = storages_found(rank, view.find)
    return rows if found is None else rows[found[rows]]


def _body(rank: Rank, view: View, rows: Ints, first: int, order: Order) -> tuple[list[html.Tr], bool]:
    """Returns rows of the table, and whether there are more."""
    is_by_size = order == Order()
    # One more than is shown says whether there are more.
    groups = group_alike(rank, rank.tree, rows, _by(view), first + CHUNK + 1 if is_by_size else None)
    if not groups:
        return [], False
    most = groups[0].size
    if not is_by_size:
        groups = sorted(groups, key=_SORTED_BY.get(order.column, _SORTED_BY[0]), reverse=not order.is_up)
    chosen = groups[first : first + CHUNK]
    if not rank.has_modules:
        chosen = [replace(one, title=one.operator or BEFORE) if one.title == OUTSIDE else one for one in chosen]
    has_source = _has_source(rank, view)
    body = [
        _row(group, most, _by(view), has_source=has_source, is_chosen=view.storage in group.rows) for group in chosen
    ]
    return body, len(groups) > first + CHUNK


_SORTED_BY: dict[int, Callable[[Group], Any]] = {
    0: lambda group: group.size,
    1: lambda group: group.title,
    2: lambda group: len(group.rows),
    3: lambda group: "" if group.source is None else group.source.place,
}


def _row(group: Group, most: int, by: str, *, has_source: bool, is_chosen: bool) -> html.Tr:
    fill = fill_of(group.category)
    count = len(group.rows)
    each = group.size // count
    exact = f"{group.size:,} bytes"
    below = " · ".join(part for part in (fill.label, group.tensor, group.operator.removesuffix(".default")) if part)
    code = source_text(group.source.file, group.source.line)[:120] if by == "line" and group.source else ""
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
                *([html.Div(html.Code(code), className="below name", title=code)] if code else []),
                html.Div(below, className="below name", title=below[:400]),
            ]
        ),
        html.Td(
            f"{count:,} \N{MULTIPLICATION SIGN} {format_bytes(each)}" if count > 1 else "1", className="number", **times
        ),
    ]
    if has_source:
        place = "" if group.source is None else group.source.place
        file, colon, line = place.rpartition(":")
        broken: Any = (
            [parts.name(file, 30), html.Wbr(), html.Span(f"{colon}{line}", className="whole")]
            if colon
            else parts.name(place, 30)
        )
        cells.append(html.Td(broken, className="source", title=place))
    return html.Tr(cells, className="chosen" if is_chosen else None)
