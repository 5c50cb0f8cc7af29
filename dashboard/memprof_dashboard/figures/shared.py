"""Common to all figures: frame, units, and the placeholder figure that shows a message."""

from __future__ import annotations

import html
from typing import Any

from plotly import graph_objects as go

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


def framed(figure: go.Figure, theme: Theme, *, height: int | None = None) -> go.Figure:
    """Applies the page's colours to a figure with a transparent background."""
    axis = {"gridcolor": theme.faint, "zerolinecolor": theme.faint, "linecolor": theme.faint, "automargin": True}
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": theme.ink, "family": "system-ui, sans-serif", "size": 12},
        hoverlabel={"bgcolor": theme.paper, "font": {"color": theme.ink}, "namelength": -1, "align": "left"},
        margin={"l": 56, "r": 16, "t": 16, "b": 40},
        xaxis=axis,
        yaxis=axis,
        legend={"traceorder": "reversed", "itemsizing": "constant"},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": theme.soft, "activecolor": theme.accent},
        height=height,
    )
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
