"""Changes between two recordings: by phase, with a breakdown of each phase's peak."""

from __future__ import annotations

from typing import Any

import numpy as np
from dash import Dash, Input, Output, State, dcc, html, no_update

from memprof.analysis.diff.comparison import Change, Diff, Pair
from memprof.analysis.diff.diff_tables import TITLES, all_parts, headline, moments, part_name
from memprof.analysis.diff.explain import explain
from memprof.analysis.diff.summary import PEAK
from memprof.replay.live import live_bytes
from memprof.units import format_bytes_change
from memprof_dashboard import ids, parts
from memprof_dashboard.figures.bars import bars_height, change_bars
from memprof_dashboard.figures.boxes import changed
from memprof_dashboard.figures.overlay import Curve, overlay
from memprof_dashboard.figures.shared import CONFIG, message
from memprof_dashboard.page import or_message, or_sentence, theme_of
from memprof_dashboard.palette import fill_of
from memprof_dashboard.sources import Rank, Workspace
from memprof_dashboard.state import View
from memprof_dashboard.views.changes import changed_boxes, changes, pair_at, shift, step_time

_MOMENT = "diff-moment"
_PARTS = "diff-parts"
_OVERLAY = "diff-overlay"
_CATEGORY_BARS = "diff-category-bars"
_MODULE_BARS = "diff-module-bars"
_BOXES = "diff-boxes"
_SHAPE = "diff-shape"
_BY = "diff-by"

#: Rows of a table, and bars of a figure, at most.
_MOST_ROWS = 15
_MOST_BARS = 10
#: Breakdowns of a moment; storages have no table here.
_KINDS = {kind: title for kind, title in TITLES.items() if kind != "storage"}


class DiffPage:
    """Comparison of two recordings."""

    TITLE = "Diff"

    def layout(self, workspace: Workspace, view: View) -> Any:
        """Returns the changes; the breakdown follows the selected moment."""
        missing = parts.missing_other(
            len(workspace.sources),
            view.other,
            how_to_open="Open two to compare them: memprof dashboard base.memprof other.memprof",
            shows="shows what changed from the recording on the left to that one",
        )
        if missing is not None:
            return missing
        found = changes(*_ranks(workspace, view))
        names = _names(workspace, view)
        moments = [
            {
                "label": "peak of the step" if pair.name == PEAK else f"peak of {pair.name}",
                "value": pair.name,
            }
            for pair in (found.peak, *found.phases)
        ]
        return html.Div(
            [
                html.P(parts.sentence(headline(found), 600), className="verdict"),
                html.Dl(
                    [
                        html.Dt("base"),
                        html.Dd(parts.name(names[0])),
                        html.Dt("head"),
                        html.Dd(parts.name(names[1])),
                        html.Dt("peak"),
                        html.Dd(parts.name(shift(found.peak), 400)),
                        html.Dt("step time"),
                        html.Dd(parts.name(step_time(found), 200)),
                    ]
                ),
                *_around(found),
                html.H3("Memory over the step"),
                parts.graph(_OVERLAY, "320px"),
                _phase_table(found),
                html.H3("Breakdown"),
                parts.control("moment", dcc.Dropdown(moments, PEAK, id=_MOMENT, clearable=False)),
                html.Div(
                    [
                        parts.switch(_SHAPE, {"flame": "Flame graph", "treemap": "Treemap"}, "shown as"),
                        parts.switch(_BY, {"module": "module", "line": "line", "stack": "stack"}, "grouped by"),
                    ],
                    className="switches",
                ),
                parts.graph(_BOXES, "360px", has_bar=False),
                parts.note("Changed bytes: orange is more, hatched green less, gray both. Click a box to zoom in."),
                html.Div(id=_PARTS),
            ],
            className="diff",
        )

    def register(self, app: Dash, workspace: Workspace) -> None:
        """Registers the callbacks."""

        @app.callback(Output(_OVERLAY, "figure"), Input(ids.THEME, "data"), State(ids.PLACE, "data"))
        def lay_over(theme: Any, place: Any) -> Any:
            view = View.from_json(place)
            return no_update if view.other < 0 else or_message(_overlay)(workspace, view, theme)

        @app.callback(Output(_PARTS, "children"), Input(_MOMENT, "value"), State(ids.PLACE, "data"))
        @or_sentence
        def split(moment: Any, place: Any) -> Any:
            view = View.from_json(place)
            return no_update if view.other < 0 else _parts(pair_at(*_ranks(workspace, view), moment))

        @app.callback(
            Output(_BOXES, "figure"),
            Input(_MOMENT, "value"),
            Input(_SHAPE, "value"),
            Input(_BY, "value"),
            Input(ids.THEME, "data"),
            State(ids.PLACE, "data"),
        )
        def draw_boxes(moment: Any, shape: Any, by: Any, theme: Any, place: Any) -> Any:
            view = View.from_json(place)
            return no_update if view.other < 0 else or_message(_boxes)(workspace, view, moment, shape, by, theme)

        @app.callback(
            Output(_CATEGORY_BARS, "figure"),
            Output(_MODULE_BARS, "figure"),
            Input(_MOMENT, "value"),
            Input(ids.THEME, "data"),
            State(ids.PLACE, "data"),
        )
        def draw(moment: Any, theme: Any, place: Any) -> Any:
            view = View.from_json(place)
            if view.other < 0:
                return no_update, no_update
            pair = pair_at(*_ranks(workspace, view), moment)
            return tuple(or_message(_bars)(pair, kind, theme) for kind in ("category", "module"))


def _ranks(workspace: Workspace, view: View) -> tuple[Rank, Rank]:
    return workspace.rank(view.trace, view.rank), workspace.rank(view.other, view.rank)


def _names(workspace: Workspace, view: View) -> tuple[str, str]:
    return workspace.source(view.trace).name, workspace.source(view.other).name


def _around(found: Diff) -> list[Any]:
    """Returns the differences in environment, and the cause of a change where it can be determined."""
    made: list[Any] = [html.P(parts.name(warning, 400), className="warning") for warning in found.warnings]
    rows = [[one.what, parts.name(one.base), parts.name(one.head)] for one in found.differences]
    plans = found.base.plan, found.head.plan
    if plans[0] != plans[1]:
        rows.append(["plan", *(parts.name(plan or "none") for plan in plans)])
    if rows:
        made += [
            html.P("The recording conditions differ, which may explain the changes:", className="warning"),
            parts.table(["condition", "base", "head"], rows, label="differences in recording conditions"),
        ]
    named = {one.what.replace(" ", "-") for one in found.differences} | {"plan"}
    causes = [cause.sentence for cause in explain(found) if cause.kind not in named]
    if causes:
        made += [
            html.H3("Likely causes"),
            html.Ul([html.Li(parts.name(f"{cause[:1].upper()}{cause[1:]}.", 600)) for cause in causes]),
        ]
    return made


def _phase_table(found: Diff) -> Any:
    return parts.facts(moments(found), label="peak of each phase", drawn={"change": lambda pair: _change(pair.bytes)})


def _change(count: int) -> Any:
    kind = "grew" if count > 0 else "shrank" if count < 0 else "same"
    return html.Span(format_bytes_change(count), title=f"{count:,} bytes", className=kind)


def _parts(pair: Pair) -> list[Any]:
    bars = [
        html.Div(
            [
                html.H4(title),
                dcc.Graph(
                    id=name,
                    config=CONFIG | {"displayModeBar": False, "scrollZoom": False},
                    responsive=True,
                    style={"height": bars_height(len(_bar_parts(pair, kind)))},
                ),
            ]
        )
        for name, kind, title in (
            (_CATEGORY_BARS, "category", "Change by category"),
            (_MODULE_BARS, "module", "Change by module"),
        )
    ]
    tables = [
        html.Div(
            [
                html.H4(f"{title[0].upper()}{title[1:]}"),
                parts.facts(
                    all_parts(pair, kind, _MOST_ROWS),
                    label=f"change {title}",
                    drawn={"change_bytes": lambda one: _change(one.bytes)},
                ),
            ]
        )
        for kind, title in _KINDS.items()
    ]
    return [
        parts.note(shift(pair)),
        html.Div(bars, className="halves even"),
        html.Div(tables, className="halves even"),
    ]


def _bar_parts(pair: Pair, kind: str) -> list[Change]:
    """Returns the parts drawn: the largest changes, with the others summed in one."""
    changed = [part for part in pair.parts[kind] if part.bytes]
    if len(changed) <= _MOST_BARS:
        return changed
    rest = changed[_MOST_BARS - 1 :]
    summed = Change(f"{len(rest):,} others", sum(part.base for part in rest), sum(part.head for part in rest))
    return [*changed[: _MOST_BARS - 1], summed]


def _bars(pair: Pair, kind: str, theme: Any) -> Any:
    shown = _bar_parts(pair, kind)
    names = [fill_of(one.name).label if kind == "category" else part_name(kind, one).text for one in shown]
    return change_bars(names, np.array([part.bytes for part in shown], dtype=np.int64), theme_of(theme))


def _boxes(workspace: Workspace, view: View, moment: Any, shape: Any, by: Any, theme: Any) -> Any:
    boxes = changed_boxes(*_ranks(workspace, view), str(moment), str(by))
    return changed(boxes, theme_of(theme), is_flame=shape == "flame")


def _overlay(workspace: Workspace, view: View, theme: Any) -> Any:
    ranks = _ranks(workspace, view)
    steps = [rank.trace.fullest_step() for rank in ranks]
    if not all(len(step.ops) for step in steps):
        return message("Nothing to draw: a step without operators.", theme_of(theme))
    curves = [
        Curve(name, live_bytes(step).during, step.ops.phase)
        for name, step in zip(_names(workspace, view), steps, strict=True)
    ]
    return overlay(curves[0], curves[1], theme_of(theme))
