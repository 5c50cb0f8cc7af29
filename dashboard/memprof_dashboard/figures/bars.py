"""Bars: memory changes between recordings and from step to step, and a device allocator's segments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from plotly import graph_objects as go

from memprof.trace.schema import NONE, Ints
from memprof.units import format_bytes, format_bytes_change
from memprof_dashboard.figures.shared import LEGEND, escaped, framed, hatched, message, unit_of
from memprof_dashboard.palette import Theme
from memprof_dashboard.views.fragments import Fragments

#: Colours of what grew and what shrank.
GREW, SHRANK = "#D55E00", "#009E73"
#: Height of a bar and of the figure's margins, in pixels.
_BAR, _AROUND = 26, 56
#: More bars have no room for their sizes.
_MOST_LABELLED = 16
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


def change_bars(names: Sequence[str], changes: Ints, theme: Theme) -> go.Figure:
    """Draws changes as bars to the right where something grew, to the left where it shrank.

    Args:
        names: What changed.
        changes: Bytes gained, negative when fewer, shape ``(names,)``.
        theme: The page's colours.

    Returns:
        The figure, the first name on top; the colour says what the sign says.
    """
    if not changes.any():
        return message("No change.", theme)
    unit, unit_bytes = unit_of(int(np.abs(changes).max()))
    x = changes / unit_bytes
    texts = [format_bytes_change(change) for change in changes.tolist()]
    figure = go.Figure(
        go.Bar(
            x=x,
            y=np.arange(len(names), dtype=np.int32),
            orientation="h",
            marker={
                "color": [GREW if change > 0 else SHRANK for change in changes.tolist()],
                "pattern": {"shape": ["" if change > 0 else "/" for change in changes.tolist()]},
                "line": {"color": theme.ink, "width": 0.5},
            },
            text=texts,
            textposition="none",
            hovertext=[escaped(name) for name in names],
            hovertemplate="%{hovertext}: %{text}<extra></extra>",
        )
    )
    figure.add_trace(
        go.Scatter(
            x=np.zeros(len(names), dtype=np.int8),
            y=np.arange(len(names), dtype=np.int32),
            mode="text",
            text=[f" {text} " for text in texts],
            # On the side of zero where the bar is not: there it has room, however long the bar is.
            textposition=["middle left" if change > 0 else "middle right" for change in changes.tolist()],
            cliponaxis=False,
            hoverinfo="skip",
        )
    )
    framed(figure, theme)
    # Room for what is written next to the bars, on a phone as well.
    low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
    room = 0.6 * (high - low)
    edges = min(low, -room if high > 0 else 0.0), max(high, room if low < 0 else 0.0)
    figure.update_layout(
        xaxis={
            "title": {"text": unit},
            "zeroline": True,
            "zerolinecolor": theme.ink,
            "range": [1.03 * edge for edge in edges],
        },
        yaxis={
            "tickmode": "array",
            "tickvals": list(range(len(names))),
            "ticktext": [escaped(name, 28) for name in names],
            "range": [len(names) - 0.5, -0.5],
            "showgrid": False,
        },
        dragmode=False,
        showlegend=False,
        margin={"l": 8, "r": 8, "t": 8, "b": 40},
    )
    return figure


def bars_height(count: int) -> str:
    """Returns the CSS height for ``count`` bars."""
    return f"{_AROUND + _BAR * max(count, 2)}px"


def growth_bars(names: Sequence[str], sizes: Sequence[int], theme: Theme, what: str = "") -> go.Figure:
    """Draws one bar for each step, or each recording.

    Args:
        names: What the bars are called.
        sizes: Their bytes.
        theme: The page's colours.
        what: What the names are of, such as ``step``; "" where they say it themselves.
    """
    if not sizes:
        return message("Growth over steps is unknown.", theme)
    unit, unit_bytes = unit_of(max(sizes))
    is_labelled = len(sizes) <= _MOST_LABELLED
    figure = go.Figure(
        go.Bar(
            x=list(range(len(names))),
            hovertext=[escaped(f"{what} {name}".strip(), 60) for name in names],
            y=[size / unit_bytes for size in sizes],
            text=[f"{size / unit_bytes:,.2f}" for size in sizes] if is_labelled else None,
            textposition="outside" if is_labelled else None,
            textangle=0,
            cliponaxis=False,
            marker={"color": theme.accent},
            hovertemplate=f"%{{hovertext}}: %{{y:,.3f}} {unit}<extra></extra>",
        )
    )
    framed(figure, theme)
    figure.update_layout(
        yaxis={"title": {"text": unit}, "rangemode": "tozero", "fixedrange": True},
        xaxis={
            "tickvals": list(range(0, len(names), max(len(names) // _MOST_LABELLED, 1))),
            "ticktext": [escaped(name, 30) for name in names[:: max(len(names) // _MOST_LABELLED, 1)]],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "title": {"text": what, "standoff": 4},
            **({"tickangle": 0} if what else {}),
        },
        uniformtext={"minsize": 9, "mode": "hide"},  # narrow bars have no room for their sizes
        showlegend=False,
        dragmode=False,
        margin={"t": 20},
    )
    return figure


def segments(fragments: Fragments, rows: Ints, theme: Theme) -> go.Figure:
    """Draws segments.

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
                    "pattern": hatched(pattern),
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
        legend=LEGEND,
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
