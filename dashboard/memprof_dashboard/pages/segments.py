"""Fragmentation at the cursor: memory that a device's allocator reserves but cannot use, by segment and address."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from dash import Dash, Input, Output, html
from plotly import graph_objects as go

from memprof.trace.schema import NONE, Bools, Ints
from memprof.units import format_bytes
from memprof_dashboard import ids, parts
from memprof_dashboard.figures.bars import PARTS, segments
from memprof_dashboard.figures.shared import LEGEND, escaped, framed, hatched, unit_of
from memprof_dashboard.page import or_sentence, theme_of, view_of
from memprof_dashboard.palette import Theme
from memprof_dashboard.sources import Rank, Workspace
from memprof_dashboard.state import View, shown
from memprof_dashboard.views.fragments import AllocatorHistory, Fragments

_BODY = "segments-body"
_GRAPH = "segments-graph"
#: Segments drawn, and rows of the table, at most.
_MOST_SEGMENTS = 300


class SegmentsPage:
    """The bars of the segments, and the fragmentation verdict."""

    TITLE = "Segments"

    def __init__(self) -> None:
        self._histories: weakref.WeakKeyDictionary[Rank, AllocatorHistory] = weakref.WeakKeyDictionary()

    def layout(self, workspace: Workspace, view: View) -> Any:
        """Returns an empty page, which follows the cursor."""
        return html.Div(id=_BODY)

    def register(self, app: Dash, workspace: Workspace) -> None:
        """Registers the callback that fills it."""

        @app.callback(Output(_BODY, "children"), Input(ids.CURSOR, "data"), Input(ids.THEME, "data"))
        @or_sentence
        def fill(cursor: Any, theme: Any) -> Any:
            view = view_of(cursor)
            rank = workspace.rank(view.trace, view.rank)
            return _page(rank, self._history(rank), shown(view, rank).at, theme_of(theme))

    def _history(self, rank: Rank) -> AllocatorHistory:
        if rank not in self._histories:
            self._histories[rank] = AllocatorHistory(rank.trace)
        return self._histories[rank]


def _page(rank: Rank, history: AllocatorHistory, at: int, theme: Theme) -> Any:
    if not history.has_segments:
        return _why_empty(rank)
    is_at_cursor = history.follows_cursor and not rank.is_end_state
    fragments = history.at(at if is_at_cursor else None)
    if not len(fragments.segments):
        return parts.empty("No segments yet", f"The allocator holds no segments while operator {at:,} runs.")
    rows = _drawn(fragments)
    facts = [
        ("reserved", int(fragments.segments.total_size_bytes.sum()), f"{len(fragments.segments):,} segments"),
        ("allocated", int(fragments.allocated.sum()), "in use"),
        ("pending free", int(fragments.awaiting.sum()), "freed, still in use by another stream"),
        ("idle", fragments.idle_bytes, "segments that are entirely free"),
        ("scattered", fragments.scattered_bytes, "free, in segments partly in use"),
        ("largest hole", fragments.most_hole, "" if fragments.is_told else "upper bound: not all blocks are known"),
    ]
    left_out = len(fragments.segments) - len(rows)
    remark = f"{len(rows):,} of {len(fragments.segments):,} segments are drawn (the largest). " if left_out else ""
    moment = (
        f"While operator {at:,} runs, at the cursor."
        if is_at_cursor
        else "At the allocator's snapshot: the recording does not say what happened before it."
    )
    return [
        html.P(verdict(fragments), className="segments-verdict"),
        html.Div([_fact(*fact) for fact in facts], className="facts"),
        *_graphs(fragments, rows, theme),
        parts.note(f"{remark}{moment}"),
        _table(fragments, rows),
    ]


def _graphs(fragments: Fragments, rows: Ints, theme: Theme) -> list[Any]:
    """Returns the bars of the segments, and a map of the addresses of expandable ones, of which few hold everything."""
    is_expandable = fragments.segments.is_expandable[rows]
    drawn = []
    if is_expandable.any():
        height = f"{110 + 46 * int(is_expandable.sum())}px"
        drawn.append(("segments-map", address_map(fragments, rows[is_expandable], theme), height))
    if not is_expandable.all():
        drawn.append((_GRAPH, segments(fragments, rows[~is_expandable], theme), "var(--segments-height)"))
    return [parts.graph(name, height, figure=figure) for name, figure, height in drawn]


def verdict(fragments: Fragments) -> str:
    """Returns whether free memory is usable: in idle segments, or scattered over segments that are partly in use."""
    free, hole = int(fragments.free.sum()), fragments.most_hole
    if not free:
        return "All reserved memory is in use: no fragmentation."
    most = "" if fragments.is_told else "at most "
    text = (
        f"{format_bytes(free)} is reserved but free: {format_bytes(fragments.idle_bytes)} in idle segments, "
        f"{format_bytes(fragments.scattered_bytes)} scattered over segments in use; the largest hole is {most}"
        f"{format_bytes(hole)}. "
    )
    request = fragments.request_bytes
    failed = f"The failed request was for {format_bytes(request)}"
    if request > free:
        return f"{text}{failed}, more than all free memory: the device is out of memory, not fragmented."
    if request > hole and fragments.is_fragmented:
        return (
            f"{text}{failed}: less than the free memory, but larger than any hole. This is fragmentation; expandable "
            "segments (--allocator expandable_segments) avoid it."
        )
    if request > hole:
        return f"{text}{failed}, larger than any hole, but too little is scattered to be fragmentation."
    if not fragments.is_fragmented:
        return f"{text}Fragmentation is not the problem: too little is scattered to matter."
    if not fragments.is_told:
        return f"{text}Whether a large request could use it is unknown: the recording does not contain all blocks."
    return (
        f"{text}This is fragmentation: no request above {format_bytes(fragments.scattered_hole)} fits between blocks."
    )


def _drawn(fragments: Fragments) -> Ints:
    """Returns the rows of the largest segments, by address."""
    total = fragments.segments.total_size_bytes
    rows: Ints = np.sort(np.argsort(-total, kind="stable")[:_MOST_SEGMENTS])
    return rows


def _fact(label: str, size: int, detail: str) -> html.Div:
    return html.Div(
        [
            html.Span(label, className="label"),
            html.Strong(format_bytes(size), title=f"{size:,} bytes"),
            html.Span(detail),
        ],
        className="fact",
    )


def _table(fragments: Fragments, rows: Ints) -> Any:
    table = fragments.segments
    body = [
        [
            f"{int(table.address[row]):#x}",
            parts.name(str(table.device[row]), 20),
            parts.name(str(table.segment_type[row]), 20),
            f"{int(table.total_size_bytes[row]):,}",
            f"{int(fragments.allocated[row]):,}",
            f"{int(fragments.awaiting[row]):,}",
            f"{int(fragments.free[row]):,}",
            "unknown" if fragments.hole[row] == NONE else f"{int(fragments.hole[row]):,}",
        ]
        for row in rows.tolist()
    ]
    heads = ["address", "device", "type", ">bytes", ">allocated", ">pending free", ">free", ">largest hole"]
    return parts.as_table(heads, body, label="segments")


def _why_empty(rank: Rank) -> Any:
    if rank.trace.manifest.machine.device_kind == "cpu":
        return parts.empty(
            "No segments on CPU",
            "A device's allocator takes large segments and divides them, which can leave memory reserved but "
            "unusable. On CPU, the system allocates tensors one by one, so there are no segments to show. See "
            "Lifetimes for the holes between tensors; record the job on its device to see that one's segments.",
        )
    return parts.empty(
        "No segments recorded",
        "This recording contains no snapshot of the device's allocator, so reserved but unused memory is unknown. "
        "Lifetimes and the timeline show what is allocated.",
    )


#: Most stretches drawn: the largest.
_MOST = 2_000
#: What lies between blocks where not all of them are known.
_UNKNOWN = ("free, or allocated before recording", "#999999", ".")


def address_map(fragments: Fragments, rows: Ints, theme: Theme) -> go.Figure:
    """Draws segments as rows of what is allocated, pending and free, from their first address to their last.

    Args:
        fragments: The segments and their blocks.
        rows: Those drawn, by address; at least one.
        theme: The page's colours.

    Returns:
        The figure: x is the offset in the segment in the unit that suits the largest. Blocks that touch are one bar.
    """
    table = fragments.segments.take(rows)
    unit, unit_bytes = unit_of(int(table.total_size_bytes.max()))
    found = [_stretches(fragments, row) for row in rows.tolist()]
    start, size, part, count = (np.concatenate(columns) for columns in zip(*found, strict=True))
    row = np.repeat(np.arange(len(rows)), [len(columns[0]) for columns in found])
    chosen = np.sort(np.argsort(-size, kind="stable")[:_MOST])
    figure = go.Figure()
    for place, (label, colour, pattern) in enumerate((*PARTS, _UNKNOWN)):
        own = chosen[part[chosen] == place]
        if not len(own):
            continue
        blocks = [f", blocks: {number:,}" if number else "" for number in count[own].tolist()]
        figure.add_trace(
            go.Bar(
                x=size[own] / unit_bytes,
                base=start[own] / unit_bytes,
                y=row[own],
                orientation="h",
                name=label,
                text=[f"{format_bytes(one)}{more}" for one, more in zip(size[own].tolist(), blocks, strict=True)],
                textposition="none",
                marker={"color": colour, "pattern": hatched(pattern), "line": {"width": 0}},
                hovertemplate=f"{label}: %{{text}}<br>at %{{base:,.3f}} {unit} of the segment<extra></extra>",
            )
        )
    framed(figure, theme)
    kinds = zip(table.stream.tolist(), table.segment_type, strict=True)
    names = [escaped(f"stream {stream}, {kind}", 28) for stream, kind in kinds]
    figure.update_layout(
        barmode="overlay",
        bargap=0.25,
        hovermode="closest",
        uirevision="kept",
        legend=LEGEND,
        xaxis={"title": {"text": f"offset in the segment, {unit}", "standoff": 6}, "showgrid": False},
        yaxis={"tickvals": list(range(len(rows))), "ticktext": names, "fixedrange": True, "autorange": "reversed"},
    )
    return figure


def _stretches(fragments: Fragments, row: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Returns the stretches of a segment: offset, bytes, place in ``PARTS`` or behind them, and blocks in each."""
    base, total = (int(column[row]) for column in (fragments.segments.address, fragments.segments.total_size_bytes))
    is_inside: Bools = (fragments.block_address >= base) & (fragments.block_address < base + total)
    start, size = fragments.block_address[is_inside] - base, fragments.block_bytes[is_inside]
    part = np.where(fragments.is_block_used[is_inside], 0, 1)
    # Where a stretch begins: behind a hole, or where the state changes.
    ends = np.append(0, start + size)[:-1]
    begins = np.flatnonzero((start > ends) | (np.diff(part, prepend=-1) != 0))
    counts = np.diff(np.append(begins, len(start)))
    sizes = np.add.reduceat(size, begins) if len(begins) else size
    first = start[begins]
    left, right = np.append(0, first + sizes), np.append(first, total)
    is_hole = right > left
    holes = left[is_hole], (right - left)[is_hole]
    nothing = np.zeros(len(holes[0]), dtype=np.int64)
    what = len(PARTS) if fragments.hole[row] == NONE else len(PARTS) - 1
    return (
        np.append(first, holes[0]),
        np.append(sizes, holes[1]),
        np.append(part[begins], nothing + what),
        np.append(counts, nothing),
    )
