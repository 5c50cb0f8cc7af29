"""Flame graph and treemap: nested boxes whose widths or areas are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from memprof.trace.schema import NONE
from memprof.units import format_bytes
from memprof_dashboard.figures.shared import escaped, framed, message
from memprof_dashboard.palette import Theme, fill_of
from memprof_dashboard.views.boxes import Box

#: How many levels of a flame graph are drawn at once; a click shows those further inside.
_DEPTH = 9


def treemap(boxes: Sequence[Box], theme: Theme, find: str = "") -> go.Figure:
    """Draws a treemap.

    Args:
        boxes: The boxes, the outermost first; each is as large as those inside it together.
        theme: The page's colours.
        find: What is searched for; the boxes whose names contain it are framed.

    Returns:
        The figure: one treemap, coloured by the category most of each box is of; ``ids`` are places in ``boxes``.
    """
    return _drawn(boxes, theme, find, is_flame=False)


def flame(boxes: Sequence[Box], theme: Theme, find: str = "") -> go.Figure:
    """Draws a flame graph, the outermost box on top; arguments as for ``treemap``."""
    return _drawn(boxes, theme, find, is_flame=True)


def is_found(box: Box, find: str) -> bool:
    """Whether a box's name, or what its storages are searched by, contains the text that is searched for."""
    wanted = find.strip().lower()
    return bool(wanted) and (wanted in box.label.lower() or wanted in box.find.lower())


def _drawn(boxes: Sequence[Box], theme: Theme, find: str, *, is_flame: bool) -> go.Figure:
    if not boxes or not boxes[0].size:
        return message("No storage is live at the cursor.", theme)
    fills = [fill_of(box.category) for box in boxes]
    colours = [theme.faint if box.parent == NONE else fill.colour for box, fill in zip(boxes, fills, strict=True)]
    around = {box.parent for box in boxes}
    marked = [is_found(box, find) for box in boxes]
    # The head of a box of a treemap that holds others is its label only.
    has_size = [place in around and not is_flame for place in range(len(boxes))]
    common: dict[str, Any] = {
        "ids": [str(place) for place in range(len(boxes))],
        "labels": [
            f"{escaped(box.label, 60)}, {format_bytes(box.size)}" if sized else escaped(box.label, 60)
            for box, sized in zip(boxes, has_size, strict=True)
        ],
        "parents": ["" if box.parent == NONE else str(box.parent) for box in boxes],
        "values": np.array([box.size for box in boxes], dtype=np.float64),
        "text": [format_bytes(box.size) for box in boxes],
        "customdata": [escaped(fill.label) for fill in fills],
        "branchvalues": "total",
        "texttemplate": "%{label}  %{text}" if is_flame else "%{label}<br>%{text}",
        "hovertemplate": (
            "%{label}<br>%{value:,.0f} B, %{percentRoot:.1%} of the total<br>mostly %{customdata}<extra></extra>"
        ),
        "pathbar": {"visible": True, "side": "top", "thickness": 22, "edgeshape": ">"},
        "sort": True,
    }
    marker: dict[str, Any] = {
        "colors": colours,
        "pattern": {
            "shape": [fill.pattern for fill in fills],
            "fillmode": "replace",  # over the colours of many boxes plotly finds no contrast, and warns
            "bgcolor": colours,
            "fgcolor": "#222222",
            "fgopacity": 0.5,
            "size": 6,
        },
        "line": {
            "width": [3 if is_marked else 1 for is_marked in marked],
            "color": [theme.ink if is_marked else theme.paper for is_marked in marked],
        },
    }
    if is_flame:
        trace: Any = go.Icicle(**common, marker=marker, tiling={"orientation": "v", "pad": 1}, maxdepth=_DEPTH)
    else:
        trace = go.Treemap(**common, marker={**marker, "pad": {"t": 20, "l": 3, "r": 3, "b": 3}}, tiling={"pad": 1})
    figure = framed(go.Figure(trace), theme)
    figure.update_layout(margin={"l": 0, "r": 0, "t": 24, "b": 0}, uniformtext={"minsize": 10, "mode": "hide"})
    return figure
