"""The blocks inside expandable segments, by address: one row for each segment, which bars of their size would hide."""

from __future__ import annotations

import numpy as np
from plotly import graph_objects as go

from memprof.trace.schema import NONE, Bools, Ints
from memprof.units import format_bytes
from memprof_dashboard.figures.bars import PARTS
from memprof_dashboard.figures.shared import LEGEND, escaped, framed, hatched, unit_of
from memprof_dashboard.palette import Theme
from memprof_dashboard.views.fragments import Fragments

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
