"""Memory that grows from step to step: which tensors stay, where they are made, and what holds them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from dash import Dash, Input, Output, dcc, html

from memprof.analysis.leaks.growth import Series, bytes_of_run, compare_series, find_step_ends
from memprof.analysis.leaks.leak import Leak, describe_holder
from memprof.analysis.leaks.leak_tables import LEAKS, series_lines
from memprof.analysis.leaks.leaks import LeakReport, describe_leaks
from memprof.analysis.table import FactTable
from memprof.trace.schema import StepPeaks
from memprof_dashboard import ids, parts
from memprof_dashboard.figures.bars import growth_bars
from memprof_dashboard.figures.shared import CONFIG
from memprof_dashboard.page import or_sentence, theme_of, view_of
from memprof_dashboard.palette import Theme
from memprof_dashboard.rank import Rank
from memprof_dashboard.sources import Workspace
from memprof_dashboard.state import View

_BODY = "leaks-body"
_MOST_ROWS = 50
#: Fewer recordings cannot tell growth from a difference.
_LEAST_SERIES = 3
_HEIGHT = {"height": "240px"}


class LeaksPage:
    """Growth over the steps of a recording, and over the open recordings."""

    TITLE = "Leaks"

    def layout(self, workspace: Workspace, view: View) -> Any:
        """Returns an empty page."""
        return html.Div(id=_BODY)

    def register(self, app: Dash, workspace: Workspace) -> None:
        """Registers the callback that fills it."""

        @app.callback(Output(_BODY, "children"), Input(ids.PLACE, "data"), Input(ids.THEME, "data"))
        @or_sentence
        def fill(place: Any, theme: Any) -> Any:
            view = view_of(place)
            ranks = tuple(source.rank(view.rank) for source in workspace.sources)
            return [
                *_recording(workspace.rank(view.trace, view.rank), theme_of(theme)),
                *(_series(ranks, theme_of(theme)) if len(ranks) >= _LEAST_SERIES else []),
            ]


@lru_cache(maxsize=8)
def _leaks_of(rank: Rank) -> tuple[LeakReport, list[str], list[int], int]:
    """Returns the leaks, the steps with their bytes, and the last operator of the last step, -1 where unknown."""
    report = rank.leaks
    peaks = rank.trace.table(StepPeaks)
    if len(peaks):
        return report, [str(step) for step in peaks.step.tolist()], bytes_of_run(peaks).tolist(), -1
    ends = find_step_ends(rank.trace)
    if ends is None:
        return report, [], [], -1
    names = [str(step) for step in ends.steps.tolist()]
    return report, names, ends.alive_bytes().tolist(), int(ends.last_op[-1])


def _recording(rank: Rank, theme: Theme) -> list[Any]:
    report, names, sizes, last = _leaks_of(rank)
    title = "In use at the end of each step"
    graph = _drawn(title, growth_bars(names, sizes, theme, "step")) if sizes else []
    if not report.leaks:
        remark = (
            "A leak makes every bar higher than the one before."
            if report.growth.bytes_per_step is not None
            else "Record more steps (memprof record --steps 10), or the whole run (memprof record --light)."
        )
        return [html.P(describe_leaks(report), className="verdict"), *graph, parts.note(remark)]
    table = parts.facts(
        FactTable(LEAKS, report.leaks[:_MOST_ROWS]),
        label="what stays from step to step",
        drawn={"made at": lambda leak: _made_at(leak, last), "held by": _held_by},
    )
    return [
        html.P(parts.with_code(describe_leaks(report), 300), className="verdict"),
        table,
        *graph,
        parts.note(
            "Select a line to see its tensors at the end of the last step. Held by: the references from a variable to "
            "one of the tensors."
        ),
    ]


def _drawn(title: str, figure: Any) -> list[Any]:
    return [html.H4(title), dcc.Graph(figure=figure, config=CONFIG | {"displayModeBar": False}, style=_HEIGHT)]


def _made_at(leak: Leak, last: int) -> Any:
    if leak.line and last >= 0:
        return parts.jump(leak.line, title="show these tensors", find=leak.line, at=last, by="line", side="table")
    return parts.name(leak.line or leak.op or "unknown")


def _held_by(leak: Leak) -> Any:
    return parts.with_code(describe_holder(leak.held_by) if leak.held_by else "unknown", 160)


@lru_cache(maxsize=4)
def _series_of(ranks: tuple[Rank, ...]) -> Series:
    return compare_series([rank.trace for rank in ranks])


def _series(ranks: tuple[Rank, ...], theme: Theme) -> list[Any]:
    series = _series_of(ranks)
    sentence = (
        "Memory in use at the end grows from each open recording to the next."
        if series.is_growing
        else "Memory in use at the end does not grow from each open recording to the next."
    )
    return [
        html.H3("Open recordings, in order"),
        html.P(sentence),
        *_drawn("In use at the end", growth_bars(series.names, series.bytes, theme)),
        *([parts.facts(series_lines(series, _MOST_ROWS), label="lines that always grow")] if series.lines else []),
    ]
