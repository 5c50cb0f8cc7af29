"""Segments of a device allocator: one bar each, split into allocated, pending free and free bytes."""

from __future__ import annotations

import numpy as np
from plotly import graph_objects as go

from memprof.trace.schema import NONE, Ints
from memprof.units import format_bytes
from memprof_dashboard.figures.shared import escaped, framed, message, unit_of
from memprof_dashboard.palette import Theme
from memprof_dashboard.views.fragments import Fragments

#: Parts of a segment: label, colour and hatching.
PARTS = (
    ("allocated", "#0072B2", ""),
    ("pending free (in use by another stream)", "#CC79A7", "x"),
    ("free (reserved)", "#999999", "/"),
)

#: Width of all marks of holes together, in pixels: those of many segments must not cover each other.
_MARKS_WIDTH = 600
#: Every one of this many has its number.
_FEW = 10
#: Bars have outlines up to this many; outlines of more would be all that is seen.
_MOST_OUTLINED = 60


def segments(fragments: Fragments, rows: Ints, theme: Theme) -> go.Figure:
    """Draws segments.

    Args:
        fragments: The segments.
        rows: Those drawn, by address.
        theme: The page's colours.

    Returns:
        The figure: bars stacked to the size of each segment, in the unit that suits the largest, with a mark at the
        largest hole of each whose holes are known.
    """
    if not len(rows):
        return message("No segments.", theme)
    table = fragments.segments.take(rows)
    unit, unit_bytes = unit_of(int(table.total_size_bytes.max()))
    x = np.arange(len(rows), dtype=np.int32)
    text = [_describe(fragments, row) for row in rows.tolist()]
    amounts = (fragments.allocated[rows], fragments.awaiting[rows], fragments.free[rows])
    figure = go.Figure()
    for (label, colour, pattern), amount in zip(PARTS, amounts, strict=True):
        figure.add_trace(
            go.Bar(
                x=x,
                y=(amount / unit_bytes).astype(np.float32),
                name=label,
                text=text,
                textposition="none",
                marker={
                    "color": colour,
                    "pattern": {"shape": pattern, "fgcolor": "#222222", "fillmode": "overlay", "size": 6},
                    "line": {"width": 0.5 if len(rows) <= _MOST_OUTLINED else 0, "color": theme.ink},
                },
                hovertemplate=f"{label}: %{{y:,.3~f}} {unit}<br>%{{text}}<extra></extra>",
            )
        )
    hole = fragments.hole[rows]
    known = np.flatnonzero(hole > 0)
    figure.add_trace(
        go.Scatter(
            x=x[known],
            y=(hole[known] / unit_bytes).astype(np.float32),
            name="largest hole",
            mode="markers",
            marker={
                "symbol": "line-ew-open",
                "size": min(14, max(_MARKS_WIDTH // len(rows), 2)),
                "color": theme.alarm,
                "line": {"width": 3 if len(rows) <= _MOST_OUTLINED else 2},
            },
            hovertemplate=f"largest hole: %{{y:,.3~f}} {unit}<extra></extra>",
        )
    )
    framed(figure, theme)
    figure.update_layout(
        barmode="stack",
        bargap=0.15,
        hovermode="closest",
        uirevision="kept",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        xaxis={
            "title": {"text": "segment (by address)", "standoff": 6},
            "showgrid": False,
            "tickangle": 0,
            **({"dtick": 1} if len(rows) <= _FEW else {}),
            "range": [-0.6, len(rows) - 0.4],
        },
        yaxis={"title": {"text": unit}, "rangemode": "tozero", "fixedrange": True},
    )
    return figure


def _describe(fragments: Fragments, row: int) -> str:
    table = fragments.segments
    kind = escaped(f"{table.segment_type[row]} segment", 24)
    pool = escaped(f", pool {table.segment_pool[row]}", 24) if table.segment_pool[row] else ""
    hole = "unknown" if fragments.hole[row] == NONE else format_bytes(int(fragments.hole[row]))
    return (
        f"{kind}{pool} at {int(table.address[row]):#x}, {format_bytes(int(table.total_size_bytes[row]))}, "
        f"stream {int(table.stream[row])}; largest hole {hole}"
    )
