"""Plans by predicted peak and step time, and planners by budget and overhead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from plotly import graph_objects as go

from memprof.trace.schema import Bools, Floats, Ints
from memprof.units import format_bytes
from memprof_dashboard.figures.shared import LEGEND, across, escaped, framed, message, note, unit_of
from memprof_dashboard.palette import Theme

#: Maximum number of dominated plans drawn: the fastest.
MOST_DOMINATED = 500

_FRONT = "#0072B2"
_VERIFIED = "#009E73"
#: One colour per planner; symbols and dashes distinguish planners without colour.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#B8A900", "#8250df")
_SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "triangle-down", "star", "hexagon")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


@dataclass(frozen=True, eq=False)
class Plans:
    """Plans as points.

    Attributes:
        peak_bytes: Predicted peak of each, shape ``(plans,)``.
        relative_time: Predicted step time, 1 for that of the recorded step, shape ``(plans,)``.
        names: What each does, in words.
    """

    peak_bytes: Ints
    relative_time: Floats
    names: Sequence[str]


@dataclass(frozen=True)
class Measured:
    """A run under a plan, as a point.

    Attributes:
        name: What the run is called.
        peak_bytes: Its peak.
        relative_time: Its step time, 1 for that of the recorded step.
    """

    name: str
    peak_bytes: int
    relative_time: float


def is_on_front(peak_bytes: Ints, relative_time: Floats) -> Bools:
    """Returns which plans are Pareto-optimal: no other plan is at least as good in both peak and step time.

    Of plans equal in both, only the first is on the front.

    Args:
        peak_bytes: Shape ``(plans,)``.
        relative_time: Shape ``(plans,)``.
    """
    order = np.lexsort((np.arange(len(peak_bytes)), relative_time, peak_bytes))
    fastest = np.minimum.accumulate(relative_time[order]) if len(order) else relative_time
    is_front = np.zeros(len(peak_bytes), dtype=np.bool_)
    is_front[order] = np.concatenate((np.ones(min(len(order), 1)), relative_time[order][1:] < fastest[:-1]))
    return is_front


def pareto(
    plans: Plans,
    recorded_bytes: int,
    budget_bytes: int,
    theme: Theme,
    *,
    chosen: int = -1,
    measured: Sequence[Measured] = (),
) -> go.Figure:
    """Draws plans by predicted peak and step time, with the Pareto front connected.

    Args:
        plans: The plans.
        recorded_bytes: Peak of the recorded step, whose time is 1.
        budget_bytes: Where the budget line is.
        theme: The page's colours.
        chosen: The plan that is ringed, -1 for none.
        measured: Runs under a plan, drawn next to the predictions.

    Returns:
        The figure. The ``customdata`` of a point is the place of its plan, -1 for the recorded step and for runs.
    """
    top = max(int(plans.peak_bytes.max(initial=0)), recorded_bytes, budget_bytes)
    unit, unit_bytes = unit_of(top)
    # The recorded step comes first: a plan that merely equals it is not on the front.
    is_front = is_on_front(
        np.concatenate(([recorded_bytes], plans.peak_bytes)), np.concatenate(([1.0], plans.relative_time))
    )[1:]
    front = np.flatnonzero(is_front)
    front = front[np.argsort(plans.peak_bytes[front], kind="stable")]
    rest = np.flatnonzero(~is_front)[:MOST_DOMINATED]
    figure = go.Figure()
    soft = {"color": "#999999", "size": 6, "opacity": 0.6}
    figure.add_trace(_points("other plans", plans, rest, unit, unit_bytes, mode="markers", marker=soft))
    marker = {"color": _FRONT, "size": 10, "symbol": "diamond", "line": {"color": theme.paper, "width": 1}}
    line = {"color": _FRONT, "width": 2, "shape": "hv"}
    figure.add_trace(
        _points("Pareto-optimal", plans, front, unit, unit_bytes, mode="lines+markers", marker=marker, line=line)
    )
    figure.add_trace(
        _single("as recorded", recorded_bytes / unit_bytes, 1.0, {"symbol": "star", "size": 14, "color": theme.ink})
    )
    for run in measured:
        look = {"symbol": "square-open-dot", "size": 13, "color": _VERIFIED, "line": {"width": 2}}
        figure.add_trace(
            _single(f"measured: {escaped(run.name)}", run.peak_bytes / unit_bytes, run.relative_time, look)
        )
    if 0 <= chosen < len(plans.names):
        ring = {"symbol": "circle-open", "size": 20, "color": theme.accent, "line": {"width": 3}}
        x, y = float(plans.peak_bytes[chosen] / unit_bytes), float(plans.relative_time[chosen])
        figure.add_trace(_single("chosen", x, y, ring))
        figure.data[-1].update(hoverinfo="skip", hovertemplate=None)
    framed(figure, theme)
    edge = budget_bytes / unit_bytes
    corner = {"yref": "paper", "xanchor": "right", "yanchor": "top", "textangle": -90}
    figure.update_layout(
        xaxis={"title": {"text": f"predicted peak, {unit}", "standoff": 6}, "rangemode": "tozero"},
        yaxis={"title": {"text": "step time relative to recorded"}, "tickformat": ".2f"},
        legend=LEGEND,
        hovermode="closest",
        dragmode="pan",
        margin={"t": 48},
        shapes=[across(edge, {"color": theme.alarm, "width": 1.5, "dash": "dash"})],
        annotations=[note(edge, 1, f"budget {format_bytes(budget_bytes)}", 12, theme.alarm, **corner)],
    )
    return figure


def _points(name: str, plans: Plans, rows: Ints, unit: str, unit_bytes: int, **look: Any) -> go.Scatter:
    return go.Scatter(
        x=(plans.peak_bytes[rows] / unit_bytes).astype(np.float32),
        y=plans.relative_time[rows].astype(np.float32),
        name=name,
        text=[escaped(plans.names[row], 90) for row in rows.tolist()],
        customdata=rows.tolist(),  # an array would be missing from what a click sends
        hovertemplate=f"%{{text}}<br>%{{x:,.2f}} {unit}, %{{y:.3f}}x step time<extra></extra>",
        **look,
    )


def _single(name: str, x: float, y: float, marker: dict[str, Any]) -> go.Scatter:
    return go.Scatter(
        x=[x],
        y=[y],
        name=name,
        mode="markers",
        marker=marker,
        customdata=[-1],
        hovertemplate=f"{name}<br>%{{x:,.2f}}, %{{y:.3f}}x step time<extra></extra>",
    )


@dataclass(frozen=True, eq=False)
class PlannerLine:
    """One planner's results.

    Attributes:
        name: The planner.
        shares: Budgets as shares of the recorded peak, shape ``(budgets,)``.
        overheads: Time on top of the recorded step as a share of it, NaN where nothing fits, shape ``(budgets,)``.
        remarks: How each search ended, a sentence each.
    """

    name: str
    shares: Floats
    overheads: Floats
    remarks: Sequence[str]


def planner_lines(lines: Sequence[PlannerLine], bounds: tuple[Floats, Floats], theme: Theme) -> go.Figure:
    """Draws the overhead each planner needs at each budget (as Jain 2020, figure 5, and Kirisame 2021, figure 2).

    Args:
        lines: The planners.
        bounds: Budgets, and the overhead below which no schedule is that swaps nothing, 0 where nothing is known.
        theme: The page's colours.
    """
    if not any(np.isfinite(line.overheads).any() for line in lines):
        return message("No planner found a schedule within any of these budgets.", theme)
    figure = go.Figure()
    known = bounds[1] > 0
    if known.any():
        figure.add_trace(
            go.Scatter(
                x=100 * bounds[0][known],
                y=100 * bounds[1][known],
                name="lower bound without swapping",
                mode="lines",
                line={"color": theme.ink, "width": 1, "dash": "dot"},
                fill="tozeroy",
                fillcolor="rgba(128,128,128,0.2)",
                hovertemplate="%{y:.1f} % at least<extra></extra>",
            )
        )
    for place, line in enumerate(lines):
        figure.add_trace(
            go.Scatter(
                x=100 * line.shares,
                y=100 * line.overheads,
                name=escaped(line.name),
                mode="lines+markers",
                line={"color": _COLOURS[place % len(_COLOURS)], "width": 2, "dash": _DASHES[place % len(_DASHES)]},
                marker={"symbol": _SYMBOLS[place % len(_SYMBOLS)], "size": 8},
                text=[escaped(remark) for remark in line.remarks],
                hovertemplate="%{y:.1f} % at a budget of %{x:.0f} %<br>%{text}",
            )
        )
    framed(figure, theme)
    figure.update_layout(
        xaxis={"title": {"text": "budget, % of the recorded peak", "standoff": 6}, "autorange": "reversed"},
        yaxis={"title": {"text": "overhead, %"}, "rangemode": "tozero"},
        legend={"traceorder": "normal", "orientation": "h", "y": -0.22, "yanchor": "top"},
        hovermode="closest",
        dragmode="pan",
    )
    return figure
