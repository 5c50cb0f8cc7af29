"""Common to all figures: frame, units, a placeholder, and the operators that are drawn, one a column."""

from __future__ import annotations

import base64
import html
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from plotly import graph_objects as go

from memprof.replay.history import History
from memprof.trace.schema import Floats, Ints
from memprof.units import format_bytes, parse_bytes
from memprof_dashboard.palette import Theme

#: Plotly configuration of every figure: no links to external servers, no logo.
CONFIG: Any = {
    "displaylogo": False,
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "responsive": True,
    "scrollZoom": True,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "png", "scale": 2},
}
#: What a chart shows until its data is there: without it, plotly draws axes of its own.
BLANK: Any = {
    "data": [],
    "layout": {
        "xaxis": {"visible": False},
        "yaxis": {"visible": False},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    },
}
#: Maximum columns drawn; more than a screen's width would be invisible.
COLUMNS = 800


#: A legend in lines above a figure.
LEGEND: Any = {"orientation": "h", "traceorder": "normal", "x": 0, "y": 1.02, "yanchor": "bottom"}


def hatched(pattern: str) -> dict[str, Any]:
    """Returns a hatching over a color; ``pattern`` is plotly's name of it, "" for none."""
    return {"shape": pattern, "fgcolor": "#222222", "fillmode": "overlay", "size": 6}


def note(x: float, y: float, text: str, size: float, color: str, **more: Any) -> dict[str, Any]:
    """Returns an annotation: a text at a place of the figure."""
    return {"x": x, "y": y, "text": text, "showarrow": False, "font": {"size": size, "color": color}, **more}


def pointer(x: float, y: float, text: str, theme: Theme, by: tuple[int, int], **more: Any) -> dict[str, Any]:
    """Returns an annotation that points at a place, ``by`` pixels away from it, in a frame."""
    look = {"showarrow": True, "arrowhead": 2, "arrowcolor": theme.ink, "bgcolor": theme.paper}
    look |= {"bordercolor": theme.ink, "font": {"color": theme.ink}}
    return {"x": x, "y": y, "text": text, "ax": by[0], "ay": by[1], **look, **more}


def across(x: float, line: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Returns a line over the whole height of a figure."""
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line, **more}


def band(first: float, end: float, color: str, opacity: float, **more: Any) -> dict[str, Any]:
    """Returns a rectangle over the whole height of a figure."""
    look = {"type": "rect", "fillcolor": color, "opacity": opacity, "line": {"width": 0}}
    return {"x0": first, "x1": end, "y0": 0, "y1": 1, "yref": "paper", **look, **more}


class Figure:
    """A figure as plotly.js reads it, where plotly's own classes take a seventh of a second to check the first one.

    Attributes:
        data: Its traces.
        layout: Its layout.
    """

    def __init__(self, theme: Theme, **layout: Any) -> None:
        """Begins a figure without traces; fields of ``layout`` are merged into the look of all figures."""
        self.data: list[dict[str, Any]] = []
        self.layout = merged(_look(theme), layout)

    def to_plotly_json(self) -> dict[str, Any]:
        """Returns it for JSON, numbers as base64: the method that dash and plotly call."""
        return {"data": [{key: _packed(value) for key, value in trace.items()} for trace in self.data]} | {
            "layout": self.layout
        }


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Returns nested fields with others put in."""
    both = {key: merged(base[key], more[key]) for key in base.keys() & more if isinstance(base[key], dict)}
    return {**base, **more, **both}


def _packed(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return {"dtype": value.dtype.str[1:], "bdata": base64.b64encode(value.tobytes()).decode()}


def _look(theme: Theme) -> dict[str, Any]:
    axis = {"gridcolor": theme.faint, "zerolinecolor": theme.faint, "linecolor": theme.faint, "automargin": True}
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": theme.ink, "family": "system-ui, sans-serif", "size": 12},
        "hoverlabel": {"bgcolor": theme.paper, "font": {"color": theme.ink}, "namelength": -1, "align": "left"},
        "margin": {"l": 56, "r": 16, "t": 16, "b": 40},
        "xaxis": axis,
        "yaxis": axis,
        "legend": {"traceorder": "reversed", "itemsizing": "constant"},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": theme.soft, "activecolor": theme.accent},
    }


def framed(figure: go.Figure, theme: Theme, *, height: int | None = None) -> go.Figure:
    """Applies the page's colours to a figure with a transparent background."""
    figure.update_layout(template="none", height=height, **_look(theme))
    return figure


def message(sentence: str, theme: Theme) -> go.Figure:
    """Returns a figure that shows a message."""
    figure = framed(go.Figure(), theme)
    figure.add_annotation(text=escaped(sentence), x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    # A place for the cursor, which may move meanwhile.
    nothing = {"type": "line", "x0": 0, "x1": 0, "y0": 0, "y1": 0, "line": {"width": 0}}
    figure.update_layout(xaxis={"visible": False}, yaxis={"visible": False}, shapes=[nothing])
    return figure


def unit_of(most_bytes: int) -> tuple[str, int]:
    """Returns the binary unit that suits a number of bytes, and its bytes. Dividing by it is exact."""
    unit = format_bytes(max(int(most_bytes), 1)).rpartition(" ")[2]
    return unit, parse_bytes(f"1 {unit}")


def escaped(text: str, longest: int = 120) -> str:
    """Returns a name from a trace as text that a figure shows as it is: no markup, not too long."""
    shown = text if len(text) <= longest else f"{text[: longest // 2]}…{text[-longest // 2 :]}"
    return html.escape(shown)


@dataclass(frozen=True, eq=False)
class Drawn:
    """The operators drawn for a range.

    Attributes:
        first: First operator of the range.
        end: End of the range (exclusive).
        left: Where each column begins, shape ``(columns,)``.
        op_ids: The operator drawn in each column: its fullest one.
        lows: Fewest bytes alive in each column.
    """

    first: int
    end: int
    left: Ints
    op_ids: Ints
    lows: Ints

    @property
    def is_exact(self) -> bool:
        """Whether every operator has a column of its own."""
        return len(self.op_ids) == self.end - self.first

    def phase_runs(self, history: History) -> tuple[Ints, Ints]:
        """Returns the runs of columns of one phase.

        Returns:
            Their phases as places in ``history.phases``, ``len(history.phases)`` for recomputed operators, shape
            ``(runs,)``; and the first column of each, with the number of columns at the end, shape ``(runs + 1,)``.
        """
        codes = np.where(history.runs_again[self.op_ids], len(history.phases), history.phase[self.op_ids])
        starts = np.concatenate(([0], np.flatnonzero(np.diff(codes)) + 1)).astype(np.int64)[: len(codes)]
        return codes[starts].astype(np.int64), np.append(starts, len(codes))


def draw(
    total: Ints, first: int, end: int, columns: int = COLUMNS, cuts: Ints | None = None, clock: Floats | None = None
) -> Drawn:
    """Downsamples a range: returns every operator, or the peak operator of each column.

    All categories are evaluated at these operators, so the stack shows bytes live at the same time. Sampling each
    category separately would draw totals that never occurred.

    Args:
        total: Bytes alive during each operator of the recording, shape ``(ops,)``.
        first: First operator of the range.
        end: End of the range (exclusive).
        columns: Most columns.
        cuts: Operators at which a column has to begin, in addition; None for none.
        clock: When operators begin, where columns are equally long in time; None for equally many operators.
    """
    count = end - first
    if count <= columns:
        op_ids = np.arange(first, end)
        return Drawn(first, end, op_ids, op_ids, total[first:end])
    left = first + (np.arange(columns) * count) // columns
    if clock is not None:
        times = np.linspace(clock[first], clock[end], columns, endpoint=False)
        left = np.unique(np.append(first, np.searchsorted(clock[:end], times).clip(first, end - 1)))
    if cuts is not None:
        left = np.union1d(left, cuts[(cuts > first) & (cuts < end)])
    lows = np.minimum.reduceat(total[first:end], left - first)
    # The first operator that reaches each column's maximum. Loops over columns, not operators.
    edges = [*left.tolist(), end]
    op_ids = np.array([low + int(total[low:high].argmax()) for low, high in pairwise(edges)], dtype=np.int64)
    return Drawn(first, end, left, op_ids, lows)
