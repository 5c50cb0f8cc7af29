"""The memory timeline of a range of operators, stacked by category; its highest point is the true peak."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from plotly import graph_objects as go

from memprof.replay.history import History
from memprof.trace.schema import Ints
from memprof_dashboard.figures.shared import Drawn, draw, escaped, framed, unit_of
from memprof_dashboard.figures.timeline_marks import Marks, Places, labels, shapes
from memprof_dashboard.palette import (
    PHASE_COLOURS,
    RECOMPUTED,
    RECOMPUTED_COLOUR,
    Fill,
    Theme,
    fill_of,
    phase_colours,
)

#: Operators that are far from each other on the screen.
_FEW = 64
#: Columns of the overview strip.
_STRIP = 600


def timeline(history: History, first: int, end: int, theme: Theme, marks: Marks | None = None) -> go.Figure:
    """Draws live bytes over a range of operators, stacked by category.

    Args:
        history: The recording.
        first: First operator of the range.
        end: End of the range (exclusive).
        theme: The page's colours.
        marks: Lines to mark.

    Returns:
        The figure: an area for each category that holds anything there, the line of the total, a dotted line of each
        column's lowest where columns hold several operators, and a band of the phases. x is the operator's row, or its
        place on the axis of another recording; y is bytes in the unit that suits the peak.
    """
    marks = marks or Marks()
    drawn = draw(history.total, first, end, cuts=marks.cuts)
    total = history.total[drawn.op_ids]
    top = max(int(total.max(initial=0)), marks.most_bytes, marks.capacity_bytes, marks.budget_bytes)
    top = max([top, *(int(line.heights.max(initial=0)) for line in marks.overlaid)])
    unit, unit_bytes = unit_of(top)
    x = marks.place(np.append(drawn.left, end))
    figure = go.Figure()
    for category in history.categories:
        alive = history.alive_bytes(category, drawn.op_ids)
        if alive.any():
            figure.add_trace(_area(fill_of(category), x, alive, unit, unit_bytes))
    total_line = _line(
        "total", x, total, unit, unit_bytes, {"width": 1.25 if drawn.is_exact else 0.75, "color": theme.ink}
    )
    if marks.told is not None:
        told = [marks.told(op_id) for op_id in drawn.op_ids.tolist()]
        total_line.update(text=[*told, told[-1]], hovertemplate=f"%{{y:,.3f}} {unit}<br>%{{text}}")
    total_line.showlegend = False
    figure.add_trace(total_line)
    if not drawn.is_exact:
        lowest = _line("lowest", x, drawn.lows, unit, unit_bytes, {"width": 1, "color": theme.ink, "dash": "dot"})
        lowest.opacity, lowest.showlegend = 0.45, False
        figure.add_trace(lowest)
    if marks.searched is not None:
        found = marks.searched[drawn.op_ids]
        figure.add_trace(_line("found", x, found, unit, unit_bytes, {"width": 2.5, "color": theme.accent}))
    for one in marks.overlaid:
        line = {"width": 2.5, "color": one.colour or theme.accent}
        figure.add_trace(_line(escaped(one.name, 40), one.edges, one.heights, unit, unit_bytes, line))
    figure.add_trace(_phases(history, drawn, x))
    framed(figure, theme)
    shown = "" if drawn.is_exact else f" (each pixel: max of {-(-(end - first) // len(total)):,}; dotted: min)"
    band = 0.1 if marks.title else 0.06  # a figure with a title shares the window with another one
    figure.update_layout(
        xaxis={
            "title": {"text": f"operator{shown}", "standoff": 4, "font": {"size": 11}},
            "range": [*(marks.axis or (first, end))],
            "showgrid": False,
            "anchor": "y2",
            "unifiedhovertitle": {"text": "operator %{x:,.0f}"},
        },
        yaxis={
            "title": {"text": unit},
            "range": [0, 1.12 * top / unit_bytes],
            "fixedrange": True,
            "domain": [band + 0.02, 1],
        },
        yaxis2={"visible": False, "fixedrange": True, "domain": [0, band], "range": [0, 1]},
        hovermode="x unified",
        hoversubplots="axis",  # the band of the phases is in the label, too
        hoverdistance=-1 if len(drawn.op_ids) <= _FEW else 20,  # pixels; the nearest operator, however far, of a few
        shapes=shapes(marks, history, drawn, unit_bytes, theme),
        annotations=labels(marks, history, drawn, x, top, unit_bytes, theme),
        dragmode="zoom",
        uirevision="kept",
        showlegend=marks.has_legend,
        legend={
            "orientation": "h",
            "traceorder": "normal",
            "x": 0,
            "y": 1.05,
            "yanchor": "bottom",
            "font": {"size": 11},
        },
    )
    if marks.title:
        text = {"text": escaped(marks.title), "x": 0.5, "y": 0.99, "yanchor": "top", "font": {"size": 13}}
        figure.update_layout(title=text, margin={"t": 56 if marks.has_legend else 36})
    return figure


def _area(fill: Fill, x: Places, alive: Ints, unit: str, unit_bytes: int) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=_stairs(alive, unit_bytes).astype(np.float32),  # the exact sum is the total's line
        name=escaped(fill.label),
        mode="lines",
        line={"width": 0, "shape": "hv"},
        stackgroup="alive",
        fillcolor=fill.colour,
        fillpattern={"shape": fill.pattern, "fgcolor": "#222222", "fillmode": "overlay", "size": 6},
        hovertemplate=f"%{{y:,.3f}} {unit}",
    )


def _line(name: str, x: Places, y: Ints, unit: str, unit_bytes: int, line: dict[str, object]) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=_stairs(y, unit_bytes),
        name=name,
        mode="lines",
        line={**line, "shape": "hv"},
        hovertemplate=f"%{{y:,.3f}} {unit}",
    )


def _stairs(values: Ints, unit_bytes: int) -> np.ndarray:
    """Returns step heights, with the last repeated to close its step."""
    return np.append(values, values[-1:]).astype(np.float64) / unit_bytes


def _phases(history: History, drawn: Drawn, x: Places) -> go.Bar:
    """Returns the phase band: a bar for each run of operators of a phase, with a separate colour for recomputed ones.

    Bars are part of the hover label wherever the pointer is over them in x, so the phase costs no text per operator.
    """
    known = phase_colours(history.phases)
    colours = [*(known.get(name, PHASE_COLOURS["other"]) for name in history.phases), RECOMPUTED_COLOUR]
    names = [*(escaped(name or "other", 40) for name in history.phases), RECOMPUTED]
    codes, columns = drawn.phase_runs(history)
    edges = x[columns]
    return go.Bar(
        x=edges[:-1],
        y=np.ones(len(codes), dtype=np.int8),
        width=np.diff(edges),
        offset=0,
        yaxis="y2",
        marker={"color": [colours[code] for code in codes.tolist()], "line": {"width": 0}},
        name="phase",
        showlegend=False,
        customdata=[names[code] for code in codes.tolist()],
        hovertemplate="%{customdata}",
    )


@lru_cache(maxsize=2)
def _whole(history: History) -> Drawn:
    """Returns the operators drawn in the overview strip, independent of the visible range."""
    return draw(history.total, 0, history.ops, _STRIP)


def overview(history: History, first: int, end: int, theme: Theme) -> go.Figure:
    """Draws live bytes of the whole recording in one strip, with the visible range marked."""
    drawn = _whole(history)
    total = history.total[drawn.op_ids]
    unit, unit_bytes = unit_of(int(total.max(initial=0)))
    figure = go.Figure(
        go.Scatter(
            x=np.append(drawn.left, history.ops).astype(np.int32),
            y=_stairs(total, unit_bytes).astype(np.float32),
            mode="lines",
            line={"width": 1, "color": theme.ink, "shape": "hv"},
            fill="tozeroy",
            fillcolor="rgba(128,128,128,0.35)",
            hovertemplate=f"%{{y:,.2f}} {unit}<extra></extra>",
            name="total",
        )
    )
    framed(figure, theme)
    figure.update_layout(
        margin={"t": 2, "b": 2},
        xaxis={"range": [0, max(history.ops, 1)], "visible": False},
        yaxis={"visible": False, "fixedrange": True, "range": [0, 1.1 * float(total.max(initial=0)) / unit_bytes or 1]},
        showlegend=False,
        dragmode="zoom",
        shapes=[
            {
                "type": "rect",
                "x0": first,
                "x1": end,
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "fillcolor": theme.accent,
                "opacity": 0.18,
                "line": {"width": 0},
            }
        ],
    )
    return figure
