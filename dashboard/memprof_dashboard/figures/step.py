"""Draws a step's memory: columns in, plotly figures out, no Dash."""

from __future__ import annotations

import html
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from plotly import graph_objects as go

from memprof.replay.live import live_bytes, live_bytes_by_category
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step
from memprof.units import format_bytes, parse_bytes

#: Operators drawn at most. More points than a screen has columns cost time and show nothing.
MOST_OPERATORS = 5_000


@dataclass(frozen=True)
class Fill:
    """How the area of one category looks. The pattern tells areas apart where colour does not.

    Attributes:
        label: The category as people read it.
        colour: From the palette of Okabe and Ito, which colour-blind people can tell apart.
        pattern: Plotly's name of a hatching; empty for a plain area.
    """

    label: str
    colour: str
    pattern: str = ""


#: Categories from the bottom of the picture to its top: what stays for the whole step lies below what comes and goes.
FILLS = {
    "parameter": Fill("parameters", "#0072B2"),
    "buffer": Fill("buffers", "#0072B2", "."),
    "optimizer_state": Fill("optimizer state", "#56B4E9"),
    "gradient": Fill("gradients", "#009E73"),
    "input": Fill("inputs", "#CC79A7"),
    "activation": Fill("activations", "#E69F00"),
    "collective": Fill("collectives", "#000000"),
    "temporary": Fill("temporaries", "#F0E442"),
    "workspace": Fill("kernel workspace", "#D55E00", "\\"),
    "unknown": Fill("unknown", "#999999", "/"),
}

_SEPARATOR = {"width": 0.5, "color": "#222222", "shape": "hv"}


def memory_timeline(step: Step) -> go.Figure:
    """Draws what is alive while each operator of a step runs, stacked by category, with the peak marked.

    The total line's highest point is the step's peak to the byte, and the areas at every point drawn sum to the
    total there: operators are chosen from the total alone, and every category is evaluated at the same ones.

    Args:
        step: A recorded or a predicted step.

    Returns:
        The figure: one area for each category that holds anything, then the line of the total. x is the
        operator's id within the step (each stair begins at its operator; the last ends at the number of operators),
        y the allocated bytes in the binary unit that suits the peak; exact bytes are in ``customdata``. A step
        without operators gives a figure that says so.
    """
    total = live_bytes(step).during
    if not len(total):
        return _empty_figure(f"Step {step.number} has no recorded operators.")
    chosen = choose_operators(total, MOST_OPERATORS)
    # The last operator once more, where it ends: its stair has a width too.
    drawn, x = np.append(chosen, len(total) - 1), np.append(chosen, len(total))
    # Dividing by a power of two is exact, so the areas still sum to the total after it.
    unit = format_bytes(int(total.max())).rpartition(" ")[2]
    unit_bytes = parse_bytes(f"1 {unit}")
    figure = go.Figure()
    by_category = live_bytes_by_category(step)
    for category in [*FILLS, *sorted(by_category.keys() - FILLS.keys())]:
        if category in by_category and by_category[category].any():
            figure.add_trace(_area(_fill(category), x, by_category[category][drawn], unit, unit_bytes))
    described = [_describe(step, op_id) for op_id in drawn.tolist()]
    figure.add_trace(_total_line(described, x, total[drawn], unit, unit_bytes))
    _mark_peak(figure, step, int(np.argmax(total)), int(total.max()), unit_bytes)
    shown = f"{len(chosen):,} of {len(total):,} operators: the lowest and the highest of each stretch"
    figure.update_layout(
        title={"text": f"Step {step.number}: allocated bytes by category"},
        xaxis={"title": {"text": "operator" if len(chosen) == len(total) else f"operator ({shown})"}},
        yaxis={"title": {"text": unit}, "rangemode": "tozero"},
        hovermode="x unified",
        legend={"traceorder": "reversed"},
    )
    return figure


def choose_operators(total: Ints, most: int) -> Ints:
    """Chooses the operators to draw so that no peak and no valley is lost: the highest and lowest of each stretch.

    Args:
        total: Bytes alive during each operator, shape ``(ops,)``.
        most: Largest number of operators to choose, at least 4.

    Returns:
        Ids of the chosen operators, ascending, at most ``most`` of them: the first, the last, and the first
        highest and first lowest of equally long stretches. All of them where there are no more than ``most``.
    """
    if len(total) <= most:
        return np.arange(len(total), dtype=np.int64)
    stretches = (most - 2) // 2
    edges = np.linspace(0, len(total), stretches + 1).astype(np.int64)
    chosen = {0, len(total) - 1}
    for start, end in pairwise(edges):
        stretch = total[start:end]
        chosen |= {int(start + stretch.argmax()), int(start + stretch.argmin())}
    return np.array(sorted(chosen), dtype=np.int64)


def _fill(category: str) -> Fill:
    """Returns the look of a category; one this version does not know (a newer trace's) looks like an unknown one."""
    unknown = FILLS["unknown"]
    return FILLS.get(category, Fill(html.escape(category), unknown.colour, unknown.pattern))


def _area(fill: Fill, x: Ints, alive: Ints, unit: str, unit_bytes: int) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=alive / unit_bytes,
        customdata=alive.astype(np.float64),  # 64-bit integers would travel as lists
        name=fill.label,
        mode="lines",
        line=_SEPARATOR,
        stackgroup="alive",
        fillcolor=fill.colour,
        fillpattern={"shape": fill.pattern, "fgcolor": "#222222", "fillmode": "overlay"},
        hovertemplate=f"%{{y:,.2f}} {unit} (%{{customdata:,.0f}} B)",
    )


def _total_line(described: list[str], x: Ints, total: Ints, unit: str, unit_bytes: int) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=total / unit_bytes,
        customdata=total.astype(np.float64),
        text=described,
        name="total",
        mode="lines",
        line={"width": 1.5, "color": "#222222", "shape": "hv"},
        hovertemplate=f"%{{y:,.2f}} {unit} (%{{customdata:,.0f}} B)<br>%{{text}}",
    )


def _mark_peak(figure: go.Figure, step: Step, op_id: int, peak: int, unit_bytes: int) -> None:
    figure.add_annotation(
        x=op_id,
        y=peak / unit_bytes,
        text=f"peak {format_bytes(peak)}<br>{_describe(step, op_id)}",
        showarrow=True,
        arrowhead=2,
        bgcolor="#ffffff",
        bordercolor="#222222",
        font={"color": "#222222"},
    )
    # Room above the peak, for the words.
    figure.update_yaxes(range=[0, 1.25 * peak / unit_bytes])


def _describe(step: Step, op_id: int) -> str:
    """Says which operator it is and where it runs. Names come from the trace, so they are escaped."""
    module_id = step.ops.module_id[op_id]
    module = step.modules.name[module_id] or step.modules.type[module_id] if module_id != NONE else ""
    place = f" of {module}" if module else ""
    return html.escape(f"{step.ops.name[op_id]}, {step.ops.phase[op_id]}{place}")


def _empty_figure(message: str) -> go.Figure:
    figure = go.Figure()
    figure.add_annotation(text=html.escape(message), x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    figure.update_layout(xaxis={"visible": False}, yaxis={"visible": False})
    return figure
