"""Peaks of ranks: as a heatmap, one row per rank, and on a device mesh."""

from __future__ import annotations

import numpy as np
from plotly import graph_objects as go
from plotly.colors import sample_colorscale  # type: ignore[attr-defined]  # plotly-stubs lacks it

from memprof.analysis.ranks.rank_report import RankCurves, RankPeak
from memprof.trace.schema import Floats
from memprof.units import format_bytes, format_bytes_change
from memprof_dashboard.figures.shared import escaped, framed, message, pointer, unit_of
from memprof_dashboard.palette import Theme, ink_on
from memprof_dashboard.views.columns import Compared, RankPeaks
from memprof_dashboard.views.mesh import Mesh

#: Maximum cells in a heatmap: the most that a browser renders at once.
MOST_CELLS = 160_000
#: Up to this many ranks each cell shows its rank and peak.
_MOST_LABELLED = 128
_SCALE = "Cividis"


def ranks(compared: Compared, theme: Theme) -> go.Figure:
    """Draws ranks side by side.

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
    middle, is_left = float(compared.edges[column : column + 2].mean()), column < len(compared.edges) / 2
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
        annotations=[pointer(middle, worst, f"{names[worst]}'s peak", theme, (70 if is_left else -70, 0))],
    )
    return figure


def curves(found: RankCurves, theme: Theme) -> go.Figure:
    """Draws the peak steps of many ranks as a heatmap.

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


def mesh_figure(mesh: Mesh, ranks: tuple[RankPeak, ...], found: Floats, worst: int | None, theme: Theme) -> go.Figure:
    """Draws one cell for each rank.

    Args:
        mesh: The mesh, of all ranks of the job.
        ranks: Ranks that were recorded.
        found: Their peaks on the mesh (`peaks_on`).
        worst: The rank with the highest peak; None where none ran operators.
        theme: The page's colours.

    Returns:
        The figure: a heatmap of peaks in the unit that suits the highest, with the rank as ``customdata``.
    """
    peaks = found.reshape(mesh.rows, mesh.columns)
    if not np.isfinite(peaks).any():
        return message("No rank ran operators.", theme)
    unit, unit_bytes = unit_of(int(np.nanmax(peaks)))
    numbers = np.arange(peaks.size).reshape(peaks.shape)
    median = int(np.nanmedian(peaks))
    words = np.full(peaks.size, "", dtype=object)
    for rank in range(peaks.size):
        words[rank] = f"rank {rank}: not recorded"
    for one in ranks:
        if one.peak_bytes is not None and one.rank < peaks.size:
            over = format_bytes_change(one.peak_bytes - median)
            where = " of ".join(part for part in (one.phase, escaped(one.module)) if part)
            words[one.rank] = f"rank {one.rank}: {format_bytes(one.peak_bytes)}<br>{over} vs median<br>{where}"
    is_labelled = peaks.size <= _MOST_LABELLED
    rows = [mesh.row_name(row) or "all" for row in range(mesh.rows)]
    columns = [f"{mesh.names[-1]} {column}" for column in range(mesh.columns)]
    figure = go.Figure(
        go.Heatmap(
            z=(peaks / unit_bytes).astype(np.float32),
            x=np.array(columns),
            y=np.array(rows),
            customdata=numbers.astype(np.float64),
            hovertext=words.reshape(peaks.shape),
            hoverinfo="text",
            xgap=1,
            ygap=1,
            colorscale=_SCALE,
            showscale=not is_labelled,
            colorbar={"title": {"text": unit}, "thickness": 12},
        )
    )
    if is_labelled:
        figure.add_trace(_labels(peaks / unit_bytes, unit, columns, rows, theme))
    framed(figure, theme)
    shapes = []
    if worst is not None and worst < peaks.size:
        row, column = divmod(worst, mesh.columns)
        edges = {"x0": column - 0.5, "x1": column + 0.5, "y0": row - 0.5, "y1": row + 0.5}
        shapes = [{"type": "rect", **edges, "line": {"color": "#e4003a", "width": 3}}]
    figure.update_layout(
        hovermode="closest",
        dragmode=False,
        uirevision="kept",
        shapes=shapes,
        xaxis={"type": "category", "showgrid": False, "side": "top", "fixedrange": True},
        yaxis={"type": "category", "range": [mesh.rows - 0.5, -0.5], "showgrid": False, "fixedrange": True},
    )
    return figure


def _labels(heights: Floats, unit: str, columns: list[str], rows: list[str], theme: Theme) -> go.Scatter:
    flat = heights.ravel()
    is_known = np.isfinite(flat)
    low, high = float(flat[is_known].min()), float(flat[is_known].max())
    shares = np.where(is_known & (high > low), (flat - low) / ((high - low) or 1), 0.5)
    colours = sample_colorscale(_SCALE, shares.tolist(), colortype="tuple")
    inks = [ink_on("#" + "".join(f"{round(255 * part):02x}" for part in colour)) for colour in colours]
    return go.Scatter(
        x=columns * len(rows),
        y=np.array([row for row in rows for _ in columns]),
        mode="text",
        text=[
            f"{rank}<br>{height:,.2f} {unit}" if known else str(rank)
            for rank, (height, known) in enumerate(zip(flat.tolist(), is_known.tolist(), strict=True))
        ],
        textfont={"color": [ink if known else theme.ink for ink, known in zip(inks, is_known.tolist(), strict=True)]},
        hoverinfo="skip",
        showlegend=False,
    )
