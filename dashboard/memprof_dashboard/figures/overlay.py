"""Memory of two steps overlaid, aligned phase by phase."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from plotly import graph_objects as go

from memprof.trace.schema import Floats, Ints, Texts
from memprof.units import format_bytes
from memprof_dashboard.figures.shared import LEGEND, draw, escaped, framed, message, note, pointer, unit_of
from memprof_dashboard.palette import Theme, ink_on, phase_colours

#: Minimum width, in percent of the step, of a phase whose name is written on its band.
_NAMED = 9


@dataclass(frozen=True, eq=False)
class Curve:
    """The memory of one step.

    Attributes:
        name: What it is called.
        total: Bytes alive during each operator, shape ``(ops,)``.
        phases: Phase of each operator, shape ``(ops,)``.
    """

    name: str
    total: Ints
    phases: Texts

    def starts(self) -> Ints:
        """Returns the first operator of each run of operators of one phase."""
        changes = np.flatnonzero(self.phases[1:] != self.phases[:-1]) + 1
        return np.concatenate((np.zeros(min(len(self.phases), 1), dtype=np.int64), changes)).astype(np.int64)

    def edges(self) -> Ints:
        """Returns the starts of these runs and the end of the last."""
        return np.append(self.starts(), len(self.total))


def shares(base: Curve, other: Curve) -> tuple[Floats, Floats, bool]:
    """Lays the operators of two steps on one axis, from 0 to 100.

    Where both run the same phases in the same order, each run of a phase begins and ends at the same place: that of
    the base. Otherwise each operator stands at its share of its own step's operators.

    Returns:
        Where each operator of the base begins, with the end behind the last, shape ``(ops + 1,)``; the same of the
        other; and whether phases lie on each other.
    """
    one, two = base.edges(), other.edges()
    own = 100 * np.arange(len(base.total) + 1) / max(len(base.total), 1)
    is_aligned = base.phases[one[:-1]].tolist() == other.phases[two[:-1]].tolist()
    places = np.arange(len(other.total) + 1)
    laid = np.interp(places, two, own[one]) if is_aligned else 100 * places / max(len(other.total), 1)
    return own, laid, is_aligned


def overlay(base: Curve, other: Curve, theme: Theme, *, budget_bytes: int = 0) -> go.Figure:
    """Draws the bytes alive during the operators of two steps as lines, each with its peak marked.

    Args:
        base: The step to compare with, drawn dotted.
        other: The other step, drawn solid.
        theme: The page's colours.
        budget_bytes: Where the budget line is, 0 for none.

    Returns:
        The figure; x runs from 0 to 100 over the step, y is bytes in the unit that suits both.
    """
    if not len(base.total) or not len(other.total):
        return message("Nothing to draw: a step without operators.", theme)
    top = max(int(base.total.max()), int(other.total.max()), budget_bytes)
    unit, unit_bytes = unit_of(top)
    one, two, is_aligned = shares(base, other)
    figure = go.Figure()
    figure.add_trace(_line(base, one, unit, unit_bytes, {"color": theme.ink, "width": 1.5, "dash": "dot"}))
    figure.add_trace(_line(other, two, unit, unit_bytes, {"color": theme.accent, "width": 2}))
    strips = [(base, one)] if is_aligned else [(base, one), (other, two)]
    colours = phase_colours([*base.phases.tolist(), *other.phases.tolist()])
    for row, (curve, x) in enumerate(strips):
        figure.add_trace(_strip(curve, x, len(strips) - row, colours))
    framed(figure, theme)
    how = "aligned by phase" if is_aligned else "not aligned: phases differ"
    # The higher peak has its label above, the lower one below, so that neither covers the other.
    above, below = (-16, 28) if base.total.max() > other.total.max() else (28, -16)
    shapes: list[dict[str, Any]] = []
    annotations = [_peak(base, one, unit_bytes, theme, above), _peak(other, two, unit_bytes, theme, below)]
    if base.total.max() == other.total.max():
        annotations = annotations[1:]
    if budget_bytes:
        y = budget_bytes / unit_bytes
        line = {"color": theme.alarm, "width": 1.5, "dash": "dash"}
        shapes.append({"type": "line", "x0": 0, "x1": 100, "y0": y, "y1": y, "line": line})
        text = f"budget {format_bytes(budget_bytes)}"
        annotations.append(note(100, y, text, 12, theme.alarm, xanchor="right", yanchor="bottom"))
    figure.update_layout(
        xaxis={
            "title": {"text": f"% of the step ({how})", "standoff": 6},
            "range": [0, 100],
            "showgrid": False,
            "anchor": "free",
            "position": 0,
        },
        yaxis={"title": {"text": unit}, "range": [0, 1.18 * top / unit_bytes], "domain": [0.12, 1]},
        yaxis2={"visible": False, "fixedrange": True, "domain": [0, 0.09], "range": [0.5, len(strips) + 0.5]},
        legend=LEGEND,
        hovermode="closest",
        shapes=shapes,
        annotations=[
            *annotations,
            *(name for row, (curve, x) in enumerate(strips) for name in _names(curve, x, len(strips) - row, colours)),
        ],
        margin={"t": 36},
    )
    return figure


def _line(curve: Curve, x: Floats, unit: str, unit_bytes: int, line: dict[str, Any]) -> go.Scatter:
    drawn = draw(curve.total, 0, len(curve.total))
    heights = curve.total[drawn.op_ids]
    return go.Scatter(
        x=np.append(x[drawn.left], x[-1]).astype(np.float32),
        y=np.append(heights, heights[-1:]).astype(np.float64) / unit_bytes,
        name=escaped(curve.name),
        mode="lines",
        line={**line, "shape": "hv"},
        hovertemplate=f"%{{y:,.3f}} {unit} at %{{x:.1f}} %",
    )


def _strip(curve: Curve, x: Floats, row: int, colours: dict[str, str]) -> go.Heatmap:
    """Returns a band of the phases of a step: one cell for each run of operators of a phase."""
    names = curve.phases[curve.starts()].tolist()
    rows: list[Any] = [[escaped(name) for name in names]]  # plotly's type hints do not cover lists of texts
    places = {name: place for place, name in enumerate(colours)}
    count = len(colours)
    scale = [(edge / count, colour) for at, colour in enumerate(colours.values()) for edge in (at, at + 1)]
    return go.Heatmap(
        z=np.array([[places[name] for name in names]], dtype=np.int16),
        x=x[curve.edges()].astype(np.float32),
        y=np.array([row - 0.4, row + 0.4], dtype=np.float32),
        yaxis="y2",
        zmin=-0.5,
        zmax=count - 0.5,
        colorscale=scale,
        showscale=False,
        text=rows,
        hovertemplate=f"%{{text}}<extra>{escaped(curve.name)}</extra>",
    )


def _names(curve: Curve, x: Floats, row: int, colours: dict[str, str]) -> list[dict[str, Any]]:
    edges = curve.edges()
    return [
        note(
            float(x[first] + x[end]) / 2,
            row,
            escaped(str(curve.phases[first]), 20),
            10,
            ink_on(colours[str(curve.phases[first])]),
            yref="y2",
        )
        for first, end in pairwise(edges.tolist())
        if x[end] - x[first] >= _NAMED
    ]


def _peak(curve: Curve, x: Floats, unit_bytes: int, theme: Theme, below: int) -> dict[str, Any]:
    at = int(curve.total.argmax())
    text = f"{escaped(curve.name, 40)}: {format_bytes(int(curve.total[at]))}"
    return pointer(float(x[at]), float(curve.total[at] / unit_bytes), text, theme, (60 if x[at] < 50 else -60, below))
