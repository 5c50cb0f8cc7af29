"""Memory that is kept from step to step, as bars."""

from __future__ import annotations

from collections.abc import Sequence

from plotly import graph_objects as go

from memprof_dashboard.figures.shared import escaped, framed, message, unit_of
from memprof_dashboard.palette import Theme

#: More bars have no room for their sizes.
_MOST_LABELLED = 16


def growth_bars(names: Sequence[str], sizes: Sequence[int], theme: Theme, what: str = "") -> go.Figure:
    """Draws one bar for each step, or each recording.

    Args:
        names: What the bars are called.
        sizes: Their bytes.
        theme: The page's colours.
        what: What the names are of, such as ``step``; "" where they say it themselves.
    """
    if not sizes:
        return message("Growth over steps is unknown.", theme)
    unit, unit_bytes = unit_of(max(sizes))
    is_labelled = len(sizes) <= _MOST_LABELLED
    figure = go.Figure(
        go.Bar(
            x=list(range(len(names))),
            hovertext=[escaped(f"{what} {name}".strip(), 60) for name in names],
            y=[size / unit_bytes for size in sizes],
            text=[f"{size / unit_bytes:,.2f}" for size in sizes] if is_labelled else None,
            textposition="outside" if is_labelled else None,
            textangle=0,
            cliponaxis=False,
            marker={"color": theme.accent},
            hovertemplate=f"%{{hovertext}}: %{{y:,.3f}} {unit}<extra></extra>",
        )
    )
    framed(figure, theme)
    figure.update_layout(
        yaxis={"title": {"text": unit}, "rangemode": "tozero", "fixedrange": True},
        xaxis={
            "tickvals": list(range(0, len(names), max(len(names) // _MOST_LABELLED, 1))),
            "ticktext": [escaped(name, 30) for name in names[:: max(len(names) // _MOST_LABELLED, 1)]],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "title": {"text": what, "standoff": 4},
            **({"tickangle": 0} if what else {}),
        },
        uniformtext={"minsize": 9, "mode": "hide"},  # narrow bars have no room for their sizes
        showlegend=False,
        dragmode=False,
        margin={"t": 20},
    )
    return figure
