"""Host memory of the job's processes over the run, stacked by kind, with the cursor of the timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from dash import Dash, Input, Output, State, html
from plotly import graph_objects as go

from memprof.analysis.host.host_use import HostUse
from memprof.trace.schema import Floats, HostMemory, Ints, Ops
from memprof.trace.store import Trace
from memprof.units import format_bytes
from memprof_dashboard import ids, parts
from memprof_dashboard.figures.shared import BLANK, LEGEND, band, draw, escaped, framed, hatched, unit_of
from memprof_dashboard.figures.timeline_marks import Marks, limit_lines, limit_names, peak_label
from memprof_dashboard.page import or_message, theme_of, view_of
from memprof_dashboard.palette import Theme
from memprof_dashboard.sources import Workspace
from memprof_dashboard.state import View, shown

#: Name, color and hatching of each kind of memory; the last is a line, not added to the others.
_LOOKS = {
    "trainer": ("trainer", "#0072B2", ""),
    "worker": ("workers", "#E69F00", "/"),
    "child": ("child processes", "#CC79A7", "x"),
    "shared memory": ("shared memory", "#009E73", "."),
    "swapped out": ("swapped out", "#D55E00", "\\"),
    (_LINE := "mapped files"): (_LINE, "", ""),
}


def host_memory(seconds: Floats, kinds: Mapping[str, Ints], theme: Theme, marks: Marks) -> go.Figure:
    """Draws host memory from sample to sample, each held until the next; of many samples, the fullest of each column.

    Args:
        seconds: When samples were taken, ascending, two or more, shape ``(samples,)``.
        kinds: Bytes of each kind at each of them, shapes ``(samples,)``, from bottom to top.
        theme: The page's colors.
        marks: The cursor, by default the peak, and the timeline's range in seconds; and a limit as the capacity.
    """
    total: Ints = np.stack([sizes for key, sizes in kinds.items() if key != _LINE]).sum(axis=0)
    end = float(seconds[-1] + np.median(np.diff(seconds)))  # the last sample, too, is held
    drawn = draw(total, 0, len(total), clock=np.append(seconds, end))
    at = int(total.argmax()) if marks.at is None else max(int(np.searchsorted(seconds, marks.at, side="right")) - 1, 0)
    top = max(marks.capacity_bytes, *(int(sizes.max()) for sizes in (total, *kinds.values())))
    unit, unit_bytes = unit_of(top)
    x = np.append(seconds[drawn.left], end)
    figure = framed(go.Figure(), theme)
    for key, sizes in kinds.items():
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


_GRAPH = "host-graph"
#: Fewer samples make no curve; and a limit is drawn below this multiple of the peak.
_LEAST_SAMPLES, _IN_REACH = 3, 3
_NOTE = "The line is the cursor, the band what the timeline shows. The kernel can drop most pages of mapped files."
_use_of = lru_cache(maxsize=4)(HostUse.of)


class HostPage:
    """The curve of host memory, its limit, and what stands out."""

    TITLE = "Host memory"

    def layout(self, workspace: Workspace, view: View) -> Any:
        """Returns the curve, which follows the cursor, below the sentences that the report has."""
        if not has_host_memory(workspace.rank(view.trace, view.rank).trace):
            return parts.empty("Too few samples of host memory", "A job on Linux is sampled while it is recorded.")
        use = _use_of(workspace.source(view.trace).trace)
        said = [html.P(parts.with_code(sentence, 600)) for sentence in use.warnings()]
        said.insert(0, html.P(parts.sentence(use.describe(), 600), className="verdict"))
        return [*said, parts.graph(_GRAPH, "380px", figure=BLANK), parts.note(_NOTE)]

    def register(self, app: Dash, workspace: Workspace) -> None:
        """Registers the callbacks."""

        @app.callback(
            Output(_GRAPH, "figure"),
            Input(ids.CURSOR, "data"),
            Input(ids.THEME, "data"),
            State(_GRAPH, "relayoutData"),
        )
        def fill(cursor: Any, theme: Any, zoomed: Any) -> Any:
            figure = or_message(_figure)(workspace, view_of(cursor), theme)
            # Plotly would keep the zoom by `uirevision`, but not what Dash draws anew.
            edges = [(zoomed or {}).get(f"xaxis.range[{side}]") for side in range(2)]
            return figure if None in edges else figure.update_xaxes(range=edges)


def has_host_memory(trace: Trace) -> bool:
    """Returns whether a recording has enough samples of its processes to draw."""
    samples = trace.table(HostMemory)
    return len(np.unique(samples.time_us[samples.anonymous_bytes > 0])) >= _LEAST_SAMPLES


def _figure(workspace: Workspace, view: View, theme: Any) -> Any:
    use, rank = _use_of(workspace.source(view.trace).trace), workspace.rank(view.trace, view.rank)
    now, times = shown(view, rank), (rank.trace.columns(Ops, "start_us")["start_us"] - use.times_us[0]) / 1e6
    at, *edges = times[[now.at, now.first, now.end - 1]].tolist() if now.end else [np.nan] * 3
    marks = Marks(at=at if np.isfinite(at) else None, axis=(edges[0], edges[1]) if np.isfinite(edges).all() else None)
    if use.limit is not None and use.limit.total_bytes < _IN_REACH * use.total_bytes:
        marks = replace(marks, capacity_bytes=use.limit.total_bytes, device=use.limit.name)
    return host_memory((use.times_us - use.times_us[0]) / 1e6, use.over_time, theme_of(theme), marks)
