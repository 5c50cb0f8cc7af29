"""Allocations of a real device and of a dry run compared one by one: both timelines, and a table of differences."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from dash import Dash, Input, Output, State, html, no_update

from memprof.analysis.compared.allocation_sequence import AllocationSequence
from memprof.analysis.compared.comparison import compare_sequences
from memprof.analysis.compared.comparison_words import DIFFERENCES, sides, verdict
from memprof.analysis.table import COUNT, FactTable, shown
from memprof.trace.files.spool import DRY_RUN
from memprof_dashboard import ids, parts
from memprof_dashboard.figures.allocations import Aligned, allocations
from memprof_dashboard.page import or_message, theme_of
from memprof_dashboard.sources import Source, Workspace
from memprof_dashboard.state import View, dragged

_GRAPH = "allocations-graph"
#: Kinds of differences listed at most.
_MOST_ROWS = 200
#: Fewest positions that can be zoomed to.
_NARROWEST = 8


class AllocationsPage:
    """Comparison of two sequences of allocations."""

    TITLE = "Allocations"

    def layout(self, workspace: Workspace, view: View) -> Any:
        """Returns both sides' figures, the graph and the differences; for one recording, how to compare two."""
        missing = parts.missing_other(
            len(workspace.sources),
            view.other,
            how_to_open="Open a GPU's memory snapshot and a dry run to compare their allocations: memprof "
            "dashboard gpu.pickle dry-run.pickle, or memprof diff --dashboard --device NAME gpu.pickle -- train.py",
            shows="compares their allocations one by one",
        )
        if missing is not None:
            return missing
        real, dry = _sides(workspace, view)
        compared = _aligned(real.sequence(view.rank), dry.sequence(view.rank)).compared
        return html.Div(
            [
                html.P(parts.sentence(verdict(compared), 600), className="verdict"),
                html.Dl(
                    [
                        html.Dt("real"),
                        html.Dd(parts.name(real.name)),
                        html.Dt("dry run"),
                        html.Dd(parts.name(dry.name)),
                    ]
                ),
                parts.graph(_GRAPH, "var(--allocations-height)"),
                *_differences(real.sequence(view.rank), dry.sequence(view.rank)),
                html.H3("Both sides"),
                parts.note("Requested bytes, rounded up to 512."),
                parts.facts(sides(compared), label="both sides"),
            ],
            className="allocations",
        )

    def register(self, app: Dash, workspace: Workspace) -> None:
        """Registers the callbacks."""

        @app.callback(
            Output(_GRAPH, "figure"),
            Input(ids.THEME, "data"),
            Input(_GRAPH, "relayoutData"),
            State(ids.PLACE, "data"),
        )
        def fill(theme: Any, relayout: Any, place: Any) -> Any:
            view = View.from_json(place)
            return no_update if view.other < 0 else or_message(_figure)(workspace, view, relayout, theme)


def _sides(workspace: Workspace, view: View) -> tuple[Source, Source]:
    """Returns the real run and the dry run: a recording of a dry run is the latter, wherever it was opened."""
    one, other = workspace.source(view.trace), workspace.source(view.other)
    is_dry = [source.trace.manifest.backend.name == DRY_RUN for source in (one, other)]
    return (other, one) if is_dry == [True, False] else (one, other)


@lru_cache(maxsize=4)
def _aligned(real: AllocationSequence, dry: AllocationSequence) -> Aligned:
    return Aligned(compare_sequences(real, dry))


def _figure(workspace: Workspace, view: View, relayout: Any, theme: Any) -> Any:
    real, dry = _sides(workspace, view)
    aligned = _aligned(real.sequence(view.rank), dry.sequence(view.rank))
    return allocations(aligned, *_range(relayout, aligned.length), theme_of(theme))


def _range(relayout: Any, length: int) -> tuple[int, int]:
    """Returns the positions that a zoom in the browser left in sight; all of them where it names none."""
    edges = dragged(relayout)
    if edges is None:
        return 0, length
    low, high = edges
    first, end = max(round(low + 0.5), 0), min(round(high + 0.5), length)
    if end - first < _NARROWEST:
        first = max(min(first, length - _NARROWEST), 0)
        end = min(first + _NARROWEST, length)
    return first, end


def _differences(real: AllocationSequence, dry: AllocationSequence) -> list[Any]:
    aligned = _aligned(real, dry)
    found = aligned.compared.differences
    if not found:
        return [parts.note("Every allocation is equal, in the same order.")]
    columns = (*DIFFERENCES, shown("first at", COUNT, aligned.first_at))
    table = FactTable(columns, found[:_MOST_ROWS])
    left_out = len(found) - len(table.rows)
    return [
        html.H3("Differences"),
        parts.facts(table, label="differences"),
        *(
            [parts.note(f"{left_out:,} more kinds of differences, smaller than these, are not listed.")]
            if left_out
            else []
        ),
    ]
