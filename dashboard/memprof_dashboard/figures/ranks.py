"""Peaks of ranks as a heatmap, one row per rank, with the spread between ranks below."""

from __future__ import annotations

import numpy as np
from plotly import graph_objects as go

from memprof.analysis.ranks.rank_report import RankCurves
from memprof_dashboard.figures.shared import framed, message, unit_of
from memprof_dashboard.palette import Theme
from memprof_dashboard.views.columns import Compared, RankPeaks

#: Maximum cells in a heatmap: the most that a browser renders at once.
MOST_CELLS = 160_000


def ranks(compared: Compared, theme: Theme) -> go.Figure:
    """Draws ranks side by side.

    Args:
        compared: The ranks, at least one, cut into columns.
        theme: The page's colours.

    Returns:
        The figure: a heatmap of each rank's peak in each column, then the line of the spread. x is the operator of the
        rank looked at, y the rank's name, z bytes in the unit that suits the largest.
    """
    if not np.isfinite(compared.peaks).any():
        return message("No rank has operators in this range.", theme)
    unit, unit_bytes = unit_of(int(np.nanmax(compared.peaks)))
    names = [rank_name(rank) for rank in compared.ranks]
    figure = go.Figure(
        go.Heatmap(
            z=(compared.peaks / unit_bytes).astype(np.float32),
            x=compared.edges.astype(np.int32),
            y=np.array(names),
            colorscale="Cividis",
            colorbar={"title": {"text": unit}, "thickness": 12, "len": 0.76, "y": 0.62},
            hovertemplate=f"%{{z:,.3f}} {unit}<extra>%{{y}}</extra>",
        )
    )
    spread = compared.spread / unit_bytes
    figure.add_trace(
        go.Scatter(
            x=compared.edges.astype(np.int32),
            y=np.append(spread, spread[-1:]).astype(np.float32),
            yaxis="y2",
            mode="lines",
            line={"shape": "hv", "width": 1.5, "color": theme.ink},
            fill="tozeroy",
            fillcolor="rgba(128,128,128,0.3)",
            name="spread",
            hovertemplate=f"%{{y:,.3f}} {unit}<extra>between the highest and the lowest rank</extra>",
        )
    )
    framed(figure, theme)
    worst = int(np.nanargmax(np.nanmax(np.where(np.isfinite(compared.peaks), compared.peaks, -1), axis=1)))
    column = int(np.nanargmax(compared.peaks[worst]))
    figure.update_layout(
        showlegend=False,
        hovermode="closest",
        dragmode="zoom",
        uirevision="kept",
        xaxis={
            "title": {"text": "operator index", "standoff": 6},
            "range": [int(compared.edges[0]), int(compared.edges[-1])],
            "showgrid": False,
            "anchor": "y2",
        },
        yaxis={
            "type": "category",
            "range": [len(names) - 0.5, -0.5],
            "fixedrange": True,
            "domain": [0.25, 1],
            "showgrid": False,
        },
        yaxis2={
            "title": {"text": f"spread, {unit}"},
            "rangemode": "tozero",
            "fixedrange": True,
            "domain": [0, 0.2],
            "automargin": True,
            "gridcolor": theme.faint,
            "nticks": 3,
        },
        annotations=[
            {
                "x": (int(compared.edges[column]) + int(compared.edges[column + 1])) / 2,
                "y": names[worst],
                "text": f"{names[worst]}'s peak",
                "showarrow": True,
                "arrowhead": 2,
                "ax": 70 if column < len(compared.edges) / 2 else -70,
                "ay": 0,
                "arrowcolor": theme.ink,
                "bgcolor": theme.paper,
                "bordercolor": theme.ink,
                "font": {"color": theme.ink},
            }
        ],
    )
    return figure


def curves(found: RankCurves, theme: Theme) -> go.Figure:
    """Draws the peak steps of many ranks as a heatmap.

    Args:
        found: The ranks' curves.
        theme: The page's colours.

    Returns:
        The figure: a heatmap. x is how far inside the step, in percent, y the rank's name, z bytes in the unit that
        suits the largest.
    """
    if not found.bytes.size:
        return message("No rank has operators.", theme)
    unit, unit_bytes = unit_of(int(found.bytes.max()))
    ranks, width = found.bytes.shape
    shown = max(1, min(width, MOST_CELLS // ranks))
    starts = (np.arange(shown) * width) // shown
    heights = np.maximum.reduceat(found.bytes, starts, axis=1)
    names = [f"rank {number}" for number in found.ranks.tolist()]
    figure = go.Figure(
        go.Heatmap(
            z=(heights / unit_bytes).astype(np.float32),
            x=(np.append(starts, width) * (100 / width)).astype(np.float32),
            y=np.array(names),
            colorscale="Cividis",
            colorbar={"title": {"text": unit}, "thickness": 12},
            hovertemplate=f"%{{z:,.3f}} {unit}<extra>%{{y}}</extra>",
        )
    )
    framed(figure, theme)
    figure.update_layout(
        hovermode="closest",
        uirevision="kept",
        xaxis={"title": {"text": "% of the step with the highest peak", "standoff": 6}, "showgrid": False},
        yaxis={"type": "category", "range": [ranks - 0.5, -0.5], "showgrid": False},
    )
    return figure


def rank_name(rank: RankPeaks) -> str:
    """Returns the label of a rank's row."""
    return f"rank {rank.rank}"
