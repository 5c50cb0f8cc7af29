"""Two aligned sequences of allocations over each other: live bytes, their difference, and marks of each kind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from plotly import graph_objects as go

from memprof.analysis.compared.allocation_sequence import AllocationSequence
from memprof.analysis.compared.comparison import (
    EXTRA,
    MISSING,
    RESIZED,
    AllocationComparison,
    Difference,
    Unequal,
    common_positions,
)
from memprof.trace.schema import Bools, Ints
from memprof.units import format_bytes, format_bytes_change
from memprof_dashboard.figures.shared import COLUMNS, LEGEND, Drawn, band, draw, escaped, framed, message, unit_of
from memprof_dashboard.palette import Theme

#: Rows of marks from top to bottom: label, colour (of Okabe and Ito), and plotly's name of the symbol.
_ROWS = {
    MISSING: ("missing in the dry run", "#D55E00", "triangle-down"),
    EXTRA: ("extra in the dry run", "#0072B2", "triangle-up"),
    RESIZED: ("of another size", "#CC79A7", "diamond"),
}
#: Longest operator and place in the text of a point.
_LONGEST = 36


@dataclass(frozen=True, eq=False)
class Aligned:
    """A comparison on one axis: its positions hold an allocation of each side, or of one side alone."""

    compared: AllocationComparison

    @cached_property
    def _positions(self) -> tuple[Ints, Ints, int]:
        compared = self.compared
        return common_positions(compared.gaps, len(compared.real), len(compared.dry))

    @property
    def length(self) -> int:
        """Number of positions."""
        return self._positions[2]

    @cached_property
    def real_rows(self) -> Ints:
        """The last allocation of the real run at or before each position, -1 for none, shape ``(length,)``."""
        return np.searchsorted(self._positions[0], np.arange(self.length), side="right") - 1

    @cached_property
    def dry_rows(self) -> Ints:
        """The same of the dry run."""
        return np.searchsorted(self._positions[1], np.arange(self.length), side="right") - 1

    @cached_property
    def real_live(self) -> Ints:
        """Live bytes of the real run at each position, shape ``(length,)``."""
        return _live(self.compared.real, self.real_rows)

    @cached_property
    def dry_live(self) -> Ints:
        """The same of the dry run."""
        return _live(self.compared.dry, self.dry_rows)

    @cached_property
    def differs(self) -> Bools:
        """Whether the allocations at a position differ, shape ``(length,)``."""
        marks = np.zeros(self.length, dtype=np.bool_)
        marks[self._positions[0][[one.real for one in self.compared.unequal if one.real >= 0]]] = True
        marks[self._positions[1][[one.dry for one in self.compared.unequal if one.dry >= 0]]] = True
        return marks

    def at(self, one: Unequal) -> int:
        """Returns the position of an allocation that differs."""
        return int(self._positions[0][one.real] if one.real >= 0 else self._positions[1][one.dry])

    def first_at(self, difference: Difference) -> int:
        """Returns the position of the first allocation of a kind of difference; where it is extra, of its gap."""
        row = difference.first
        if difference.kind == EXTRA:
            return int(self._positions[0][row - 1]) + 1 if row else 0
        return int(self._positions[0][row])


def _live(sequence: AllocationSequence, rows: Ints) -> Ints:
    return np.where(rows < 0, sequence.start_bytes, sequence.live[np.maximum(rows, 0)]) if len(sequence) else rows * 0


def allocations(aligned: Aligned, first: int, end: int, theme: Theme) -> go.Figure:
    """Draws a range of two aligned sequences.

    Returns:
        The figure: live bytes of both sides as lines, at the peak of each pixel; below them how much more the dry run
        has, and three rows of marks where allocations are missing, extra or of another size. Both sides' lines are
        exactly on each other where the live bytes are equal.
    """
    if not aligned.length:
        return message("Nothing to draw: no allocations.", theme)
    real, dry = aligned.compared.real, aligned.compared.dry
    lines = draw(aligned.real_live, first, end), draw(aligned.dry_live, first, end)
    heights = aligned.real_live[lines[0].op_ids], aligned.dry_live[lines[1].op_ids]
    top = max(int(one.max(initial=0)) for one in heights)
    unit, unit_bytes = unit_of(top)
    texts = _texts(real, aligned.real_rows[lines[0].op_ids]), _texts(dry, aligned.dry_rows[lines[1].op_ids])
    figure = go.Figure()
    styles: tuple[dict[str, Any], dict[str, Any]] = (
        {"color": "#E69F00", "width": 5},
        {"color": theme.ink, "width": 1.5},
    )
    for name, drawn, height, text, style in zip(("real", "dry run"), lines, heights, texts, styles, strict=True):
        figure.add_trace(
            go.Scatter(
                x=drawn.left,
                y=height.astype(np.float64) / unit_bytes,
                name=name,
                mode="lines",
                line=style,
                text=text,
                hovertemplate=f"%{{y:,.3f}} {unit}, %{{text}}",
            )
        )
    gained = aligned.dry_live - aligned.real_live
    own_unit, own_bytes = unit_of(int(np.abs(gained).max(initial=0)))
    figure.add_trace(_gained(gained, own_bytes, first, end, theme))
    for row, kind in enumerate(_ROWS):
        figure.add_trace(_marks(aligned, kind, row, first, end))
    _lay_out(figure, lines[0], top / unit_bytes, unit, theme)
    figure.update_layout(
        shapes=_bands(aligned, lines[0], theme),
        yaxis2={"title": {"text": own_unit}, "range": _range(gained, own_bytes)},
    )
    return figure


def _texts(sequence: AllocationSequence, rows: Ints) -> list[str]:
    """Returns what each of these allocations is: bytes, operator and line."""
    return [_text(sequence, row) if row >= 0 else "at the beginning" for row in rows.tolist()]


def _text(sequence: AllocationSequence, row: int) -> str:
    operator = escaped(sequence.operators[row] or "unknown operator", _LONGEST)
    backward = " (backward)" if sequence.is_backward[row] else ""
    place = f" in {escaped(sequence.places[row], _LONGEST)}" if sequence.places[row] else ""
    return f"{format_bytes(int(sequence.sizes[row]))} by {operator}{backward}{place}"


def _gained(gained: Ints, unit_bytes: int, first: int, end: int, theme: Theme) -> go.Scatter:
    """Returns the line of how much more is alive in the dry run: of each pixel the largest difference."""
    drawn = draw(np.abs(gained), first, end)
    values = gained[drawn.op_ids]
    return go.Scatter(
        x=drawn.left,
        y=values.astype(np.float64) / unit_bytes,
        yaxis="y2",
        name="difference",
        mode="lines",
        line={"color": theme.alarm, "width": 1.5, "shape": "hv"},
        showlegend=False,
        text=[format_bytes_change(value) if value else "equal" for value in values.tolist()],
        hovertemplate="%{text}",
    )


def _marks(aligned: Aligned, kind: str, row: int, first: int, end: int) -> go.Scatter:
    """Returns the marks of one kind, those of one pixel as one."""
    label, colour, symbol = _ROWS[kind]
    columns: dict[int, list[Unequal]] = {}
    for one in aligned.compared.unequal:
        at = aligned.at(one)
        if one.kind == kind and first <= at < end:
            columns.setdefault((at - first) * COLUMNS // max(end - first, 1), []).append(one)
    return go.Scatter(
        x=[aligned.at(ones[0]) for ones in columns.values()],
        y=[2 - row] * len(columns),
        yaxis="y3",
        name=label,
        mode="markers",
        marker={"symbol": symbol, "size": 9, "color": colour},
        showlegend=False,
        text=[_mark_text(aligned.compared, ones) for ones in columns.values()],
        hovertemplate="%{text}",
    )


def _mark_text(compared: AllocationComparison, ones: list[Unequal]) -> str:
    one = ones[0]
    side = _text(compared.real, one.real) if one.real >= 0 else _text(compared.dry, one.dry)
    other = f"; {format_bytes(int(compared.dry.sizes[one.dry]))} in the dry run" if one.kind == RESIZED else ""
    return f"{side}{other}" + (f", and {len(ones) - 1:,} more" if len(ones) > 1 else "")


def _range(gained: Ints, unit_bytes: int) -> list[float]:
    """Returns the range of the axis of differences, with zero in it."""
    low, high = int(gained.min(initial=0)), int(gained.max(initial=0))
    room = 0.12 * max(high - low, 1)
    return [(low - room) / unit_bytes, (high + room) / unit_bytes]


def _bands(aligned: Aligned, drawn: Drawn, theme: Theme) -> list[dict[str, Any]]:
    """Returns bands behind the lines where allocations differ, at most one for each two pixels."""
    edges = [*drawn.left.tolist(), drawn.end]
    differs = np.logical_or.reduceat(aligned.differs[drawn.first : drawn.end], drawn.left - drawn.first)
    bounds = np.flatnonzero(np.diff(np.concatenate(([False], differs, [False])).astype(np.int8))).reshape(-1, 2)
    return [
        band(edges[low] - 0.5, edges[high] - 0.5, theme.alarm, 0.16, yref="y domain", layer="below")
        for low, high in bounds.tolist()
    ]


def _heading(text: str, y: float) -> dict[str, Any]:
    corner = {"x": 0, "y": y, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    return {"text": text, "showarrow": False, "font": {"size": 11}, **corner}


def _lay_out(figure: go.Figure, drawn: Drawn, top: float, unit: str, theme: Theme) -> None:
    framed(figure, theme)
    count = -(-(drawn.end - drawn.first) // len(drawn.left))
    shown = "" if drawn.is_exact else f" (each pixel: max of {count:,})"
    axis = {"gridcolor": theme.faint, "zerolinecolor": theme.faint, "linecolor": theme.faint, "automargin": True}
    figure.update_layout(
        xaxis={
            "title": {"text": f"aligned allocations{shown}", "standoff": 4, "font": {"size": 11}},
            "range": [drawn.first - 0.5, drawn.end - 0.5],
            "showgrid": False,
            "anchor": "y3",
        },
        yaxis={"title": {"text": unit}, "range": [0, 1.12 * top], "domain": [0.42, 1]},
        yaxis2={**axis, "fixedrange": True, "domain": [0.2, 0.34], "nticks": 4},
        yaxis3={
            **axis,
            "fixedrange": True,
            "domain": [0, 0.13],
            "range": [-0.7, 2.7],
            "tickvals": [2 - row for row in range(len(_ROWS))],
            "ticktext": [label.partition(" in ")[0] for label, _, _ in _ROWS.values()],  # the heading has the rest
            "zeroline": False,
        },
        annotations=[_heading("dry run minus real run", 0.345), _heading("in the dry run", 0.135)],
        hovermode="x unified",
        hoversubplots="axis",
        dragmode="zoom",
        uirevision="kept",
        legend=LEGEND,
        margin={"t": 36},
    )
