"""Treemap: nested boxes whose areas are bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from plotly import graph_objects as go

from memprof.trace.schema import NONE
from memprof.units import format_bytes
from memprof_dashboard.figures.shared import escaped, framed, message
from memprof_dashboard.palette import Theme, fill_of
from memprof_dashboard.views.boxes import Box


def treemap(boxes: Sequence[Box], theme: Theme, find: str = "") -> go.Figure:
    """Draws a treemap.

    Args:
        boxes: The boxes, the outermost first; each is as large as those inside it together.
        theme: The page's colours.
        find: What is searched for; the boxes of the modules it was chosen by are framed.

    Returns:
        The figure: one treemap, coloured by the category most of each box is of; ``ids`` are places in ``boxes``.
    """
    if not boxes or not boxes[0].size:
        return message("No storage is live at the cursor.", theme)
    fills = [fill_of(box.category) for box in boxes]
    colours = [theme.paper if box.parent == NONE else fill.colour for box, fill in zip(boxes, fills, strict=True)]
    around = {box.parent for box in boxes}
    framed_boxes = [bool(find) and box.modules > 0 and box.find == find for box in boxes]
    figure = go.Figure(
        go.Treemap(
            ids=[str(place) for place in range(len(boxes))],
            labels=[
                # The head of a box that holds others is its label only.
                f"{escaped(box.label, 60)}, {format_bytes(box.size)}" if place in around else escaped(box.label, 60)
                for place, box in enumerate(boxes)
            ],
            parents=["" if box.parent == NONE else str(box.parent) for box in boxes],
            values=np.array([box.size for box in boxes], dtype=np.float64),
            text=[format_bytes(box.size) for box in boxes],
            customdata=[escaped(fill.label) for fill in fills],
            branchvalues="total",
            marker={
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
                    "width": [4 if is_framed else 1 for is_framed in framed_boxes],
                    "color": [theme.accent if is_framed else theme.paper for is_framed in framed_boxes],
                },
                "pad": {"t": 20, "l": 3, "r": 3, "b": 3},
            },
            texttemplate="%{label}<br>%{text}",
            hovertemplate=(
                "%{label}<br>%{value:,.0f} B, %{percentRoot:.1%} of the total<br>mostly %{customdata}<extra></extra>"
            ),
            tiling={"pad": 1},
            pathbar={"visible": False},
            sort=True,
        )
    )
    framed(figure, theme)
    figure.update_layout(margin={"l": 4, "r": 4, "t": 4, "b": 4})
    return figure
