"""Host memory of the job's processes over the run, with the cursor of the timeline."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from dash import Dash, Input, Output, State, html

from memprof.analysis.host.host_use import HostUse
from memprof.trace.schema import HostMemory, Ops
from memprof.trace.store import Trace
from memprof_dashboard import ids, parts
from memprof_dashboard.figures.host import host_memory
from memprof_dashboard.figures.shared import BLANK
from memprof_dashboard.figures.timeline_marks import Marks
from memprof_dashboard.page import or_message, theme_of, view_of
from memprof_dashboard.sources import Workspace
from memprof_dashboard.state import View, shown

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
