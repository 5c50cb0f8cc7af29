"""The memory timeline of a range of operators, stacked by category; its highest point is the true peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from plotly import graph_objects as go

from memprof.replay.history import History
from memprof.trace.schema import Floats, Ints
from memprof.units import format_bytes
from memprof_dashboard.figures.drawn import COLUMNS, Drawn, draw
from memprof_dashboard.figures.shared import escaped, framed, unit_of
from memprof_dashboard.palette import (
    PHASE_COLOURS,
    RECOMPUTED,
    RECOMPUTED_COLOUR,
    Fill,
    Theme,
    fill_of,
    ink_on,
    phase_colours,
)

#: Columns of the overview strip.
_STRIP = 600
#: Maximum number of step boundaries marked.
_MOST_STEPS = 40


@dataclass(frozen=True, eq=False)
class Overlaid:
    """A line over the areas: the total of another recording, or of a prediction, on this recording's axis.

    Attributes:
        name: What it is called.
        edges: Where each of its stretches begins, with the end behind the last, shape ``(stretches + 1,)``.
        heights: Bytes alive in each, shape ``(stretches,)``.
        colour: Its colour; "" for the theme's accent.
    """

    name: str
    edges: Floats
    heights: Ints
    colour: str = ""


@dataclass(frozen=True)
class Marks:
    """Markers on a timeline.

    Attributes:
        at: The operator under the cursor, None for none.
        budget_bytes: Where the budget line is, 0 for none.
        capacity_bytes: Device capacity, 0 for none.
        most_bytes: Height of the y axis where it is shared with another figure, 0 for this figure's own.
        device: Name of the device, for its line.
        searched: Live bytes of the search matches during each operator, None without a search.
        told: What the hover says of an operator, by its row; None for the figures alone.
        overlaid: Lines over the areas, each with its peak marked.
        title: Title of the figure, "" for none.
        has_legend: Whether the categories are listed above it.
    """

    at: int | None = None
    budget_bytes: int = 0
    capacity_bytes: int = 0
    most_bytes: int = 0
    device: str = ""
    searched: Ints | None = None
    told: Callable[[int], str] | None = None
    overlaid: tuple[Overlaid, ...] = ()
    title: str = ""
    has_legend: bool = True


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
        column's lowest where columns hold several operators, and a band of the phases. x is the operator's row, y
        bytes in the unit that suits the peak.
    """
    marks = marks or Marks()
    drawn = draw(history.total, first, end)
    total = history.total[drawn.op_ids]
    top = max(int(total.max(initial=0)), marks.most_bytes, marks.capacity_bytes, marks.budget_bytes)
    top = max([top, *(int(line.heights.max(initial=0)) for line in marks.overlaid)])
    unit, unit_bytes = unit_of(top)
    x = np.append(drawn.left, end).astype(np.int32)
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
    figure.add_trace(_phases(history, drawn))
    framed(figure, theme)
    shown = "" if drawn.is_exact else f" (each pixel: max of {-(-(end - first) // len(total)):,}; dotted: min)"
    band = 0.1 if marks.title else 0.06  # a figure with a title shares the window with another one
    figure.update_layout(
        xaxis={
            "title": {"text": f"operator{shown}", "standoff": 4, "font": {"size": 11}},
            "range": [first, end],
            "showgrid": False,
            "anchor": "y2",
        },
        yaxis={
            "title": {"text": unit},
            "range": [0, 1.12 * top / unit_bytes],
            "fixedrange": True,
            "domain": [band + 0.02, 1],
        },
        yaxis2={"visible": False, "fixedrange": True, "domain": [0, band], "range": [0, 1]},
        hovermode="x unified",
        shapes=[*lines(marks, first, end, unit_bytes, theme), *_step_lines(history, first, end, theme)],
        annotations=[
            *_step_names(history, first, end, theme),
            *_phase_names(history, drawn),
            *_line_names(marks, end, top, unit_bytes, theme),
            *_peak(drawn, total, unit_bytes, theme),
            *(_overlaid_peak(line, (first + end) / 2, unit_bytes, theme) for line in marks.overlaid),
        ],
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


def lines(marks: Marks, first: int, end: int, unit_bytes: int, theme: Theme) -> list[dict[str, object]]:
    """Returns the shapes of cursor, budget and capacity, the cursor first."""
    shapes: list[dict[str, object]] = [cursor_line(marks.at, theme)]
    for size, dash in ((marks.budget_bytes, "dash"), (marks.capacity_bytes, "longdashdot")):
        if size:
            y = size / unit_bytes
            line = {"color": theme.alarm, "width": 1.5, "dash": dash}
            shapes.append({"type": "line", "x0": first, "x1": end, "y0": y, "y1": y, "line": line})
    return shapes


def cursor_line(at: int | None, theme: Theme) -> dict[str, object]:
    """Returns the shape of the cursor, with zero width where there is none."""
    return {
        "type": "line",
        "x0": (at or 0) + 0.5,
        "x1": (at or 0) + 0.5,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": theme.accent, "width": 0 if at is None else 1.5},
    }


def _area(fill: Fill, x: np.ndarray, alive: Ints, unit: str, unit_bytes: int) -> go.Scatter:
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


def _line(name: str, x: np.ndarray, y: Ints, unit: str, unit_bytes: int, line: dict[str, object]) -> go.Scatter:
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


def _phases(history: History, drawn: Drawn) -> go.Heatmap:
    """Returns the phase band: one row of colours, with a separate colour for recomputed operators."""
    known = phase_colours(history.phases)
    colours = [*(known.get(name, PHASE_COLOURS["other"]) for name in history.phases), RECOMPUTED_COLOUR]
    count = len(colours)
    scale = [(edge / count, colour) for place, colour in enumerate(colours) for edge in (place, place + 1)]
    codes = np.where(history.runs_again[drawn.op_ids], len(history.phases), history.phase[drawn.op_ids])
    names = np.array([*(escaped(name or "other") for name in history.phases), RECOMPUTED], dtype=object)
    return go.Heatmap(
        z=codes[None, :].astype(np.int8),
        x=np.append(drawn.left, drawn.end).astype(np.int32),
        y=np.array([0.0, 1.0]),
        yaxis="y2",
        zmin=-0.5,
        zmax=count - 0.5,
        colorscale=scale,
        showscale=False,
        name="phase",
        text=names[codes][None, :] if drawn.is_exact or len(codes) <= COLUMNS else None,
        hovertemplate="%{text}<extra>phase</extra>",
    )


def _phase_names(history: History, drawn: Drawn) -> list[dict[str, object]]:
    """Returns the names of the phases, written on the band where they have room."""
    codes = np.where(history.runs_again[drawn.op_ids], len(history.phases), history.phase[drawn.op_ids])
    colours = phase_colours(history.phases)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(codes)) + 1)).astype(np.int64)
    edges = np.append(drawn.left[starts], drawn.end)
    width = drawn.end - drawn.first
    names = []
    for place, (left, right) in enumerate(pairwise(edges.tolist())):
        code = int(codes[starts[place]])
        name = RECOMPUTED if code == len(history.phases) else history.phases[code] or "other"
        if right - left < width * (0.02 + 0.011 * len(name)):
            continue
        colour = RECOMPUTED_COLOUR if name == RECOMPUTED else colours.get(name, PHASE_COLOURS["other"])
        names.append(
            {
                "x": (left + right) / 2,
                "y": 0.5,
                "yref": "y2",
                "text": escaped(name, 40),
                "showarrow": False,
                "font": {"size": 10.5, "color": ink_on(colour)},
            }
        )
    return names


def _line_names(marks: Marks, end: int, top: int, unit_bytes: int, theme: Theme) -> list[dict[str, object]]:
    """Returns the labels of the budget and the device, at the right end of their lines."""
    names = []
    gap = marks.capacity_bytes - marks.budget_bytes
    is_close = marks.capacity_bytes > 0 and 0 <= gap < 0.06 * top
    for size, label in ((marks.budget_bytes, "budget"), (marks.capacity_bytes, escaped(marks.device, 40) or "device")):
        if 0 < size <= 1.12 * top:
            names.append(
                {
                    "x": end,
                    "y": size / unit_bytes,
                    "xanchor": "right",
                    "yanchor": "top" if is_close and size == marks.budget_bytes else "bottom",
                    "text": f"{label} {format_bytes(size)}",
                    "showarrow": False,
                    "font": {"size": 11, "color": theme.alarm},
                }
            )
    return names


def _step_starts(history: History, first: int, end: int) -> Ints:
    """Returns the step boundaries inside a range; none where there are too many to distinguish."""
    step = history.step[first:end]
    starts = np.flatnonzero(np.diff(step)) + 1
    if len(starts) > _MOST_STEPS:
        return np.empty(0, dtype=np.int64)
    return first + np.concatenate(([0], starts)).astype(np.int64)


def _step_lines(history: History, first: int, end: int, theme: Theme) -> list[dict[str, object]]:
    line = {"color": theme.faint, "width": 1, "dash": "dot"}
    starts = _step_starts(history, first, end).tolist()
    return [
        {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line} for x in starts if x > first
    ]


def _step_names(history: History, first: int, end: int, theme: Theme) -> list[dict[str, object]]:
    return [
        {
            "x": x,
            "y": 1,
            "yref": "paper",
            "yanchor": "bottom",
            "xanchor": "left",
            "text": f"step {history.step[x]}",
            "showarrow": False,
            "font": {"size": 10, "color": theme.ink},
        }
        for x in _step_starts(history, first, end).tolist()
    ]


def _peak(drawn: Drawn, total: Ints, unit_bytes: int, theme: Theme) -> list[dict[str, object]]:
    if not len(total):
        return []
    place = int(total.argmax())
    is_left = drawn.left[place] < (drawn.first + drawn.end) / 2
    return [
        {
            "x": int(drawn.left[place]),
            "y": float(total[place] / unit_bytes),
            "text": f"peak {format_bytes(int(total[place]))}",
            "showarrow": True,
            "arrowhead": 6,
            "arrowsize": 0.7,
            "arrowwidth": 1.5,
            "ax": 56 if is_left else -56,
            "ay": -12,
            "arrowcolor": theme.ink,
            "bgcolor": theme.ink,
            "borderpad": 3,
            "font": {"color": theme.paper, "size": 11.5},
        }
    ]


def _overlaid_peak(line: Overlaid, middle: float, unit_bytes: int, theme: Theme) -> dict[str, object]:
    place = int(line.heights.argmax())
    x, size = float(line.edges[place]), int(line.heights[place])
    return {
        "x": x,
        "y": size / unit_bytes,
        "text": f"{escaped(line.name, 24)} {format_bytes(size)}",
        "showarrow": True,
        "arrowhead": 6,
        "arrowsize": 0.7,
        "arrowwidth": 1.5,
        "ax": 70 if x < middle else -70,
        "ay": -14,
        "arrowcolor": line.colour or theme.accent,
        "bgcolor": theme.paper,
        "bordercolor": line.colour or theme.accent,
        "borderpad": 2,
        "font": {"color": theme.ink, "size": 11},
    }


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
        margin={"l": 56, "r": 8, "t": 2, "b": 2},
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
