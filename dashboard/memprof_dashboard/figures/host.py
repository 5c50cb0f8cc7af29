"""The host memory of the job's processes over the run, stacked by kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from plotly import graph_objects as go

from memprof.trace.schema import Floats, Ints
from memprof.units import format_bytes
from memprof_dashboard.figures.shared import LEGEND, band, draw, escaped, framed, hatched, unit_of
from memprof_dashboard.figures.timeline_marks import Marks, limit_lines, limit_names, peak_label
from memprof_dashboard.palette import Theme

#: Name, color and hatching of each kind of memory; the last is a line, not added to the others.
_LOOKS = {
    "trainer": ("trainer", "#0072B2", ""),
    "worker": ("workers", "#E69F00", "/"),
    "child": ("child processes", "#CC79A7", "x"),
    "shared memory": ("shared memory", "#009E73", "."),
    "swapped out": ("swapped out", "#D55E00", "\\"),
    (_LINE := "mapped files"): (_LINE, "", ""),
}


def host_memory(seconds: Floats, parts: Mapping[str, Ints], theme: Theme, marks: Marks) -> go.Figure:
    """Draws host memory from sample to sample, each held until the next; of many samples, the fullest of each column.

    Args:
        seconds: When samples were taken, ascending, two or more, shape ``(samples,)``.
        parts: Bytes of each kind at each of them, shapes ``(samples,)``, from bottom to top.
        theme: The page's colors.
        marks: The cursor, by default the peak, and the timeline's range in seconds; and a limit as the capacity.
    """
    total: Ints = np.stack([sizes for key, sizes in parts.items() if key != _LINE]).sum(axis=0)
    end = float(seconds[-1] + np.median(np.diff(seconds)))  # the last sample, too, is held
    drawn = draw(total, 0, len(total), clock=np.append(seconds, end))
    at = int(total.argmax()) if marks.at is None else max(int(np.searchsorted(seconds, marks.at, side="right")) - 1, 0)
    top = max(marks.capacity_bytes, *(int(sizes.max()) for sizes in (total, *parts.values())))
    unit, unit_bytes = unit_of(top)
    x = np.append(seconds[drawn.left], end)
    figure = framed(go.Figure(), theme)
    for key, sizes in parts.items():
        label, color, pattern = _LOOKS.get(key, (escaped(key, 40), "#999999", "x"))
        look: Any = {"line": {"width": 1.5, "color": theme.ink, "dash": "dot", "shape": "hv"}}
        if key != _LINE:
            look = {"line": {"width": 0, "shape": "hv"}, "fillcolor": color, "fillpattern": hatched(pattern)}
        look |= {"mode": "lines", "legendgroup": label, "yhoverformat": ",.3f"}
        group, fill = ("host", "tozeroy") if key != _LINE else (None, None)
        nowhere: Any = [None]  # in the legend, a name of its own
        heights = (sizes[np.append(drawn.op_ids, len(total) - 1)] / unit_bytes).astype(np.float32)
        figure.add_trace(go.Scatter(x=x, y=heights, name=label, stackgroup=group, showlegend=False, **look))
        figure.add_trace(
            go.Scatter(x=nowhere, y=nowhere, name=f"{label}  {format_bytes(int(sizes[at]))}", fill=fill, **look)
        )
    title = {"text": "seconds of the run", "standoff": 4, "font": {"size": 11}}
    window = marks.axis or (0, 0)
    names = limit_names(marks, (0, "left"), top, unit_bytes, theme)
    figure.update_layout(
        xaxis={
            "title": title,
            "showgrid": False,
            "unifiedhovertitle": {"text": f"at %{{x:,.1f}} s ({unit})"},
        },
        yaxis={"title": {"text": unit}, "range": [0, 1.12 * top / unit_bytes], "fixedrange": True},
        hovermode="x unified",
        shapes=[*limit_lines(marks, 0, end, unit_bytes, theme), band(window[0], window[1], theme.accent, 0.18)],
        annotations=[*names, *peak_label(x, total[drawn.op_ids], unit_bytes, theme)],
        dragmode="zoom",
        uirevision="kept",
        legend={**LEGEND, "font": {"size": 11}},
    )
    return figure
