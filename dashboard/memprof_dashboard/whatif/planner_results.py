"""The planner comparison on the what-if page: each planner's overhead at each budget."""

from __future__ import annotations

from typing import Any

import numpy as np
from dash import Dash, Input, Output, State, dcc, html, no_update

from memprof.analysis.plans.compare_planners import Point
from memprof_dashboard import ids, parts
from memprof_dashboard.figures.shared import CONFIG
from memprof_dashboard.figures.whatif import PlannerLine, planner_lines
from memprof_dashboard.page import or_message, or_sentence, theme_of
from memprof_dashboard.whatif import plan_parts
from memprof_dashboard.whatif.planning import count_points
from memprof_dashboard.whatif.workspace import COMPARED, PLANNERS, PlanWorkspace

_LINES = "whatif-lines"


def register_planners(app: Dash, searches: PlanWorkspace) -> None:
    """Registers the callbacks."""

    @app.callback(Output(PLANNERS, "children"), Input(COMPARED, "data"), State(ids.PLACE, "data"))
    @or_sentence
    def show(_: Any, place: Any) -> Any:
        search = searches.of(place)[1]
        if search is None or search.is_running:
            return []
        points = search.result()
        remarks = []
        if len(points) < count_points():
            remarks.append(parts.note(f"Stopped: showing {len(points)} of {count_points()} results."))
        return [
            html.H3("Overhead by planner"),
            parts.note(
                "Planners schedule single operators; plans act on whole modules, so these figures are a lower bound "
                "for them."
            ),
            *remarks,
            dcc.Graph(id=_LINES, config=CONFIG, responsive=True, style={"height": "460px"}),
            *plan_parts.planner_table(points),
        ]

    @app.callback(Output(_LINES, "figure"), Input(COMPARED, "data"), Input(ids.THEME, "data"), State(ids.PLACE, "data"))
    def draw(_: Any, theme: Any, place: Any) -> Any:
        search = searches.of(place)[1]
        if search is None or search.is_running:
            return no_update
        return or_message(_lines)(search.result(), theme)


def _lines(points: tuple[Point, ...], theme: Any) -> Any:
    lines = []
    for name in dict.fromkeys(point.planner for point in points):
        own = [point for point in points if point.planner == name]
        lines.append(
            PlannerLine(
                name,
                np.array([point.share for point in own]),
                np.array([point.overhead for point in own]),
                [point.reason for point in own],
            )
        )
    shares = sorted({point.share for point in points})
    bounds = [max(point.bound for point in points if point.share == share) for share in shares]
    return planner_lines(lines, (np.array(shares), np.array(bounds)), theme_of(theme))
