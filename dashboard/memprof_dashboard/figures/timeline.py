"""The memory timeline of a range of operators, stacked by category; its highest point is the true peak."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from memprof.replay.history import History
from memprof.trace.schema import Floats, Ints
from memprof_dashboard.figures.peak_inset import find_inset
from memprof_dashboard.figures.shared import LEGEND, Drawn, Figure, band, draw, escaped, hatched, note, unit_of
from memprof_dashboard.figures.timeline_marks import Marks, Places, labels, shapes
from memprof_dashboard.palette import (
    PHASE_COLOURS,
    RECOMPUTED,
    RECOMPUTED_COLOUR,
    Theme,
    fill_of,
    phase_colours,
)

#: Operators that are far from each other on the screen.
_FEW = 64
#: The y axis in heights of what is drawn.
_HEADROOM = 1.12
#: Columns of the overview strip.
_STRIP = 600


def timeline(history: History, first: int, end: int, theme: Theme, marks: Marks | None = None) -> Figure:
    """Draws live bytes over a range of operators, stacked by category.

    Args:
        history: The recording.
        first: First operator of the range.
        end: End of the range (exclusive).
        theme: The page's colours.
        marks: Lines to mark.

    Returns:
        The figure: an area for each category that holds anything there, the line of the total, a dotted line of each
        column's lowest where columns hold several operators, a band of the phases, and an inset where the peak is too
        narrow to see. x is the operator's row, its time in ms, or its place on the axis of another recording; y is
        bytes in the unit that suits the peak.
    """
    marks = marks or Marks()
    drawn = draw(history.total, first, end, cuts=marks.cuts, clock=marks.clock)
    total = history.total[drawn.op_ids]
    top = max(int(total.max(initial=0)), marks.most_bytes, marks.capacity_bytes, marks.budget_bytes)
    top = max([top, *(int(line.heights.max(initial=0)) for line in marks.overlaid)])
    unit, unit_bytes = unit_of(top)
    x = marks.place(np.append(drawn.left, end))
    data: list[dict[str, Any]] = []
    for category in history.categories:
        alive = history.alive_bytes(category, drawn.op_ids)
        if alive.any():
            data.append(_area(category, x, alive, unit_bytes) | {"showlegend": marks.has_legend})
    ink: dict[str, Any] = {"color": theme.ink}
    total_line = _line("total", x, total, unit, unit_bytes, ink | {"width": 1.25 if drawn.is_exact else 0.75})
    if marks.told is not None:
        told = [marks.told(op_id) for op_id in drawn.op_ids.tolist()]
        total_line |= {"text": [*told, told[-1]], "hovertemplate": f"%{{y:,.3f}} {unit}<br>%{{text}}"}
    data.append(total_line | {"showlegend": False})
    if not drawn.is_exact:
        lowest = _line("lowest", x, drawn.lows, unit, unit_bytes, ink | {"width": 1, "dash": "dot"})
        data.append(lowest | {"opacity": 0.45, "showlegend": False})
    if marks.searched is not None:
        found = marks.searched[drawn.op_ids]
        data.append(_line("found", x, found, unit, unit_bytes, {"width": 2.5, "color": theme.accent}))
    for one in marks.overlaid:
        line = {"width": 2.5, "color": one.colour or theme.accent}
        data.append(_line(escaped(one.name, 40), one.edges, one.heights, unit, unit_bytes, line))
    data.append(_phases(history, drawn, x))
    count = "several" if marks.clock is not None else f"{-(-(end - first) // len(total)):,}"
    shown = "" if drawn.is_exact else f" (each pixel: max of {count}; dotted: min)"
    title, hover = "operator", "operator %{x:,.0f}"
    if marks.clock is not None:
        title, hover = "operator time, ms", "at %{x:,.3f} ms"
    strip = 0.1 if marks.title else 0.06  # a figure with a title shares the window with another one
    figure = Figure(
        theme,
        xaxis={
            "title": {"text": f"{title}{shown}", "standoff": 4, "font": {"size": 11}},
            "range": [*(marks.axis or (first, end))],
            "showgrid": False,
            "anchor": "y2",
            "unifiedhovertitle": {"text": f"{hover} ({unit})"},
        },
        yaxis={
            "title": {"text": unit},
            "range": [0, _HEADROOM * top / unit_bytes],
            "fixedrange": True,
            "domain": [strip + 0.02, 1],
        },
        yaxis2={"visible": False, "fixedrange": True, "domain": [0, strip], "range": [0, 1]},
        hovermode="x unified",
        hoversubplots="axis",  # the band of the phases is in the label, too
        hoverdistance=-1 if len(drawn.op_ids) <= _FEW else 20,  # pixels; the nearest operator, however far, of a few
        shapes=shapes(marks, history, drawn, unit_bytes, theme),
        annotations=labels(marks, history, drawn, x, top, unit_bytes, theme),
        dragmode="zoom",
        uirevision="kept",
        showlegend=marks.has_legend or marks.searched is not None or bool(marks.overlaid),
        legend={**LEGEND, "y": 1.05, "font": {"size": 11}},
    )
    if marks.title:
        text = {"text": escaped(marks.title), "x": 0.5, "y": 0.99, "yanchor": "top", "font": {"size": 13}}
        figure.layout |= {"title": text}
        figure.layout["margin"] |= {"t": 56 if figure.layout["showlegend"] else 36}
    figure.data = data
    _add_inset(figure, history, drawn, marks, x, _HEADROOM * top, strip + 0.02, theme)
    return figure


def _add_inset(
    figure: Figure, history: History, drawn: Drawn, marks: Marks, x: Places, top: float, floor: float, theme: Theme
) -> None:
    """Adds the neighborhood of a narrow peak, on axes of its own; ``floor`` is where the plot begins on the paper."""
    inset = find_inset(history, drawn, marks, x, top)
    if inset is None:
        return
    unit, unit_bytes = unit_of(int(top))
    inside = draw(history.total, inset.first, inset.end)
    edges = np.append(inside.left, inset.end).astype(np.int32)
    on_own: Any = {"xaxis": "x3", "yaxis": "y3", "name": "inset", "showlegend": False, "hoverinfo": "skip"}
    most = 1.3 * float(history.total[inside.op_ids].max() / unit_bytes)
    ground: Any = {"fill": "tozeroy", "fillcolor": theme.paper, "line": {"width": 0}}  # over the grid of the timeline
    traces: list[Any] = [
        {"type": "scatter", "x": [inset.first, inset.end], "y": [most, most], "mode": "lines", **ground}
    ]
    for category in history.categories:
        alive = history.alive_bytes(category, inside.op_ids)
        if alive.any():
            traces.append(_area(category, edges, alive, unit_bytes) | {"stackgroup": "inset"})
    line = {"width": 1, "color": theme.ink}
    traces.append(_line("total", edges, history.total[inside.op_ids], unit, unit_bytes, line))
    figure.data += [trace | on_own | {"hovertemplate": None} for trace in traces]
    low, high = (floor + (1 - floor) * edge for edge in inset.y)
    axis: Any = {"visible": False, "fixedrange": True}
    figure.layout |= {
        "xaxis3": {**axis, "domain": inset.x, "anchor": "y3", "range": [inset.first, inset.end]},
        "yaxis3": {**axis, "domain": [low, high], "anchor": "x3", "range": [0, most]},
    }
    left, right = inset.x
    on_paper: Any = {"xref": "paper", "yref": "paper"}
    line = {"width": 1, "color": theme.soft}
    box: Any = {"x0": left, "x1": right, "y0": low, "y1": high}
    across, up = inset.peak
    end = min(max(across, left), right)
    lead: Any = {"x0": across, "y0": floor + (1 - floor) * up, "x1": end, "y1": (low + high) / 2}
    start, stop = figure.layout["xaxis"]["range"]
    for shape in figure.layout["shapes"]:
        if shape["line"].get("dash") == "dot" and left < (shape["x0"] - start) / (stop - start) < right:
            shape["y1"] = low  # where a step begins, not over the inset
    figure.layout["shapes"] += [
        {"type": "line", "layer": "between", "line": line, **on_paper, **lead},
        {"type": "rect", "line": line, **on_paper, **box},
    ]
    text, corner = f"{inset.end - inset.first:,} operators", {"xanchor": "left", "yanchor": "top"}
    figure.layout["annotations"].append(note(left, high, text, 10.5, theme.soft, **corner, **on_paper))


def _area(category: str, x: Places, alive: Ints, unit_bytes: int) -> dict[str, Any]:
    heights: Any = _stairs(alive, unit_bytes).astype(np.float32)  # the exact sum is the total's line
    has_none = heights < 0.0005
    hover = {"hoverinfo": np.where(has_none, "none", "all").tolist()} if has_none.any() else {}
    return {"x": x, "y": heights, **hover, **area_look(category)}


def area_look(category: str) -> dict[str, Any]:
    """Returns a category's area without its points."""
    fill = fill_of(category)
    return {
        "type": "scatter",
        "line": {"width": 0, "shape": "hv"},
        "stackgroup": "alive",
        "yhoverformat": ",.3f",  # with a template, plotly would ignore where nothing is to be said: of zeros
        "name": escaped(fill.label),
        "mode": "lines",
        "fillcolor": fill.colour,
        "fillpattern": hatched(fill.pattern),
    }


def _line(name: str, x: Places, y: Ints, unit: str, unit_bytes: int, line: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": x,
        "y": _stairs(y, unit_bytes),
        "name": name,
        "mode": "lines",
        "line": {**line, "shape": "hv"},
        "hovertemplate": f"%{{y:,.3f}} {unit}",
    }


def _stairs(values: Ints, unit_bytes: int) -> np.ndarray:
    """Returns step heights, with the last repeated to close its step."""
    return np.append(values, values[-1:]).astype(np.float64) / unit_bytes


def _phases(history: History, drawn: Drawn, x: Places) -> dict[str, Any]:
    """Returns the phase band: a bar for each run of operators of a phase, with a separate colour for recomputed ones.

    Bars are part of the hover label wherever the pointer is over them in x, so the phase costs no text per operator.
    """
    looks = phase_looks(history)
    codes, columns = drawn.phase_runs(history)
    edges = x[columns]
    return {
        "type": "bar",
        "x": edges[:-1],
        "y": np.ones(len(codes), dtype=np.int8),
        "width": np.diff(edges),
        "offset": 0,
        "yaxis": "y2",
        "marker": {"color": [looks[code]["colour"] for code in codes.tolist()], "line": {"width": 0}},
        "name": "phase",
        "showlegend": False,
        "customdata": [looks[code]["name"] for code in codes.tolist()],
        "hovertemplate": "%{customdata}",
    }


def phase_looks(history: History) -> list[dict[str, str]]:
    """Returns name and colour of each of a recording's phases, then those of recomputed operators."""
    known = {"": PHASE_COLOURS["other"], **phase_colours(history.phases)}
    looks = [{"name": escaped(name or "other", 40), "colour": known[name]} for name in history.phases]
    return [*looks, {"name": RECOMPUTED, "colour": RECOMPUTED_COLOUR}]


@lru_cache(maxsize=2)
def _whole(history: History) -> Drawn:
    """Returns the operators drawn in the overview strip, independent of the visible range."""
    return draw(history.total, 0, history.ops, _STRIP)


def overview(history: History, first: int, end: int, theme: Theme, clock: Floats | None = None) -> Figure:
    """Draws live bytes of the whole recording in one strip, with the visible range marked; over time with a clock."""
    drawn = _whole(history)
    clock = np.arange(history.ops + 1, dtype=np.float64) if clock is None else clock
    total = history.total[drawn.op_ids]
    unit, unit_bytes = unit_of(int(total.max(initial=0)))
    figure = Figure(
        theme,
        margin={"t": 2, "b": 2},
        xaxis={"range": [0, clock[-1] or 1], "visible": False},
        yaxis={"visible": False, "fixedrange": True, "range": [0, 1.1 * float(total.max(initial=0)) / unit_bytes or 1]},
        showlegend=False,
        dragmode="zoom",
        shapes=[band(float(clock[first]), float(clock[end]), theme.accent, 0.18)],
    )
    figure.data = [
        {
            "type": "scatter",
            "x": clock[np.append(drawn.left, history.ops)].astype(np.float32),
            "y": _stairs(total, unit_bytes).astype(np.float32),
            "mode": "lines",
            "line": {"width": 1, "color": theme.ink, "shape": "hv"},
            "fill": "tozeroy",
            "fillcolor": "rgba(128,128,128,0.35)",
            "hovertemplate": f"%{{y:,.2f}} {unit}<extra></extra>",
            "name": "total",
        }
    ]
    return figure
