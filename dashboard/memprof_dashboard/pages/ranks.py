"""The rank with the highest peak, and where ranks diverge."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update

from memprof.analysis.ranks import rank_report as side_by_side
from memprof.analysis.ranks.rank_tables import peaks as peaks_table
from memprof.trace.schema import NONE
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_bytes_change
from memprof_dashboard import ids, parts
from memprof_dashboard.figures.ranks import curves, ranks
from memprof_dashboard.figures.shared import message
from memprof_dashboard.page import theme_of, view_of
from memprof_dashboard.pages import rank_parts
from memprof_dashboard.palette import fill_of
from memprof_dashboard.sources import MemprofError, Workspace
from memprof_dashboard.state import View, on_zoom, shown
from memprof_dashboard.views.columns import Compared, RankPeaks, compare_ranks, read_peaks

_GRAPH = "ranks-graph"
_REMARK = "ranks-remark"
_AS_TABLE = "ranks-table"
_ROW = "ranks-row"
_TIMER = "ranks-timer"
_SUMMED = "ranks-summed"
#: Up to this many ranks, each rank's tables are read; beyond it, the recording's summaries are shown.
_MANY = 64
#: Time limit for reading ranks per response, in seconds; the next response continues.
_PATIENCE = 1.0


@dataclass
class _Read:
    """A recording's ranks read so far: their peaks, or why they cannot be read."""

    peaks: dict[int, RankPeaks] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)


class RanksPage:
    """The heatmap of the ranks, which follows the window, and a table of their peaks."""

    TITLE = "Ranks"

    def __init__(self) -> None:
        # Keyed by open trace: a recording that grew is reopened.
        self._read: weakref.WeakKeyDictionary[Trace, _Read] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def layout(self, workspace: Workspace, view: View) -> Any:
        """Returns the page; for a single rank, why there is nothing to compare."""
        trace = workspace.source(view.trace).trace
        if len(trace.ranks) < 2:
            return parts.empty(
                "Only one rank",
                "This recording is of a single process, so there is nothing to compare. Record a distributed job "
                "(memprof record -- torchrun ...) and open the folder with the recordings of its ranks.",
            )
        return html.Div(
            [
                dcc.Interval(id=_TIMER, interval=500, disabled=False),
                rank_parts.layout(trace),
                html.Div(id=_REMARK),
                parts.graph(_GRAPH, f"{min(max(18 * len(trace.ranks), 120) + 220, 900)}px"),
                html.Div(id=_AS_TABLE),
                html.Div(_summed_up(trace), id=_SUMMED),
            ]
        )

    def register(self, app: Dash, workspace: Workspace) -> None:
        """Registers the callbacks."""
        rank_parts.register(app, workspace)

        @app.callback(
            Output(_GRAPH, "figure"),
            Output(_REMARK, "children"),
            Output(_AS_TABLE, "children"),
            Output(_TIMER, "disabled"),
            Input(ids.WINDOW, "data"),
            Input(ids.THEME, "data"),
            Input(_TIMER, "n_intervals"),
        )
        def fill(window: Any, theme: Any, _: Any) -> Any:
            view = view_of(window)
            try:
                return self._filled(workspace, view, theme)
            except MemprofError as error:
                return message("Cannot draw this chart.", theme_of(theme)), parts.error(str(error)), None, True

        @app.callback(
            Output(ids.GO, "data", allow_duplicate=True),
            Input(_GRAPH, "clickData"),
            Input(_GRAPH, "relayoutData"),
            Input({"type": _ROW, "rank": ALL}, "n_clicks"),
            State(ids.VIEW, "data"),
            prevent_initial_call=True,
        )
        def go(click: Any, relayout: Any, rows: Any, whole: Any) -> Any:
            if not ctx.triggered or not ctx.triggered[0]["value"]:
                return no_update
            view = View.from_json(whole)
            if ctx.triggered_id != _GRAPH:
                return self._jump(workspace, view, ctx.triggered_id["rank"], None)
            is_of_many = len(workspace.source(view.trace).trace.ranks) > _MANY
            if ctx.triggered[0]["prop_id"].endswith("relayoutData") and is_of_many:
                return no_update
            if ctx.triggered[0]["prop_id"].endswith("relayoutData"):
                rank = workspace.rank(view.trace, view.rank)
                zoomed = on_zoom(view, rank, relayout) if isinstance(relayout, dict) else view
                return no_update if zoomed == view else {"first": zoomed.first, "end": zoomed.end}
            try:
                x, name = float(click["points"][0]["x"]), str(click["points"][0]["y"])
                number = int(name.removeprefix("rank "))
            except (KeyError, IndexError, TypeError, ValueError):
                return no_update
            return self._jump(workspace, view, number, x)

    def _read_of(self, workspace: Workspace, view: View) -> _Read:
        return self._read.setdefault(workspace.source(view.trace).trace, _Read())

    def read(self, trace: Trace, patience: float = _PATIENCE) -> _Read:
        """Reads the remaining ranks one at a time until ``patience`` runs out; at least one.

        Args:
            trace: The recording.
            patience: Seconds after which no further rank is begun.

        Returns:
            The ranks read so far.
        """
        with self._lock:
            read = self._read.setdefault(trace, _Read())
            until = time.monotonic() + patience
            for number in trace.ranks:
                if number in read.peaks or number in read.faults:
                    continue
                try:
                    read.peaks[number] = read_peaks(trace.rank_trace(number))
                except MemprofError as error:
                    read.faults[number] = str(error)
                if time.monotonic() > until:
                    break
            return read

    def _compared(self, workspace: Workspace, view: View) -> Compared | None:
        """Returns the ranks read so far, side by side; None where the one looked at is not among them."""
        rank, read = workspace.rank(view.trace, view.rank), self._read_of(workspace, view)
        reference = read.peaks.get(rank.trace.rank)
        if reference is None or not reference.ops:
            return None
        now = shown(view, rank)
        return compare_ranks(tuple(read.peaks[number] for number in sorted(read.peaks)), reference, now.first, now.end)

    def _filled(self, workspace: Workspace, view: View, theme: Any) -> tuple[Any, Any, Any, bool]:
        trace = workspace.source(view.trace).trace
        if len(trace.ranks) > _MANY:
            return _filled_with_many(trace, theme)
        read = self.read(trace)
        left = len(trace.ranks) - len(read.peaks) - len(read.faults)
        compared = self._compared(workspace, view)
        reading = [parts.note(f"Reading ranks: {left:,} of {len(trace.ranks):,} left.")] if left else []
        faults = [parts.note(f"Cannot read rank {number}: {fault}") for number, fault in read.faults.items()]
        if compared is None:
            sentence = "Reading ranks…" if left else "The selected rank has no operators to compare with."
            return message(sentence, theme_of(theme)), [*reading, *faults], None, not left
        remark = html.P(verdict(compared), className="ranks-verdict")
        return ranks(compared, theme_of(theme)), [*reading, *faults, remark], _table(compared), not left

    def _jump(self, workspace: Workspace, view: View, number: int, x: float | None) -> Any:
        """Jumps to a rank: to its peak in the visible range, or to the peak operator of the clicked column."""
        trace = workspace.source(view.trace).trace
        if len(trace.ranks) > _MANY:
            return {"rank": number, "storage": -1} if number in trace.ranks else no_update
        compared = self._compared(workspace, view)
        if compared is None or number not in [rank.rank for rank in compared.ranks]:
            return no_update
        place = [rank.rank for rank in compared.ranks].index(number)
        stretch = compared.peak_stretch(place)
        if x is not None:
            column = int(np.clip(np.searchsorted(compared.edges, x, side="right") - 1, 0, len(compared.edges) - 2))
            stretch = int(compared.stretch[place, column])
        if stretch == NONE:
            return {"rank": number, "storage": -1}
        return {"rank": number, "at": int(compared.ranks[place].op_ids[stretch]), "storage": -1}


def _summed_up(trace: Trace) -> list[Any]:
    try:
        return rank_parts.summed_up(trace)
    except MemprofError as error:
        return [parts.error(str(error))]


def _filled_with_many(trace: Trace, theme: Any) -> tuple[Any, Any, Any, bool]:
    """Returns the recording's summaries where there are too many ranks to read individually."""
    compared = side_by_side.compare_ranks(trace)
    remark = parts.note(
        f"Showing the step with the highest peak of each of {len(trace.ranks):,} ranks, scaled to equal length; open "
        "a rank for its other steps."
    )
    label = f"highest peaks of {len(compared.ranks):,} ranks"
    peaks = peaks_table(compared, rank_parts.MOST_RANKS)
    table = parts.facts(peaks, label=label, drawn={"rank": lambda one: _button(one.rank)})
    return curves(side_by_side.read_curves(trace), theme_of(theme)), [remark], table, True


def _button(number: int) -> Any:
    return html.Button(f"rank {number}", id={"type": _ROW, "rank": number}, type="button")


def verdict(compared: Compared) -> str:
    """Returns a sentence: the rank with the highest peak, by how much, and where the spread is largest."""
    places = [place for place in range(len(compared.ranks)) if compared.peak_stretch(place) != NONE]
    peaks = {place: int(np.nanmax(compared.peaks[place])) for place in places}
    worst = max(peaks, key=lambda place: peaks[place])
    where = _where(compared.ranks[worst], compared.peak_stretch(worst))
    least, most = min(peaks.values()), max(peaks.values())
    if len(places) < 2:
        return f"Rank {compared.ranks[worst].rank} peaks at {format_bytes(most)}, in {where}."
    if least == most:
        text = f"All {len(places)} ranks peak at {format_bytes(most)}, in {where}."
    else:
        over = most - int(np.median(list(peaks.values())))
        lowest = compared.ranks[min(peaks, key=lambda place: peaks[place])].rank
        text = (
            f"Rank {compared.ranks[worst].rank} peaks highest: {format_bytes(most)} in {where}, {format_bytes(over)} "
            f"above the median of {len(places)} ranks; rank {lowest} peaks lowest, at {format_bytes(least)}."
        )
    spread = compared.spread
    if not np.isfinite(spread).any() or np.nanmax(spread) == 0:
        return f"{text} The ranks hold the same at every point."
    column = int(np.nanargmax(spread))
    fullest = int(np.nanargmax(compared.peaks[:, column]))
    apart = _where(compared.ranks[fullest], int(compared.stretch[fullest, column]))
    return (
        f"{text} The spread is largest in {apart}: {format_bytes(float(spread[column]))} between rank "
        f"{compared.ranks[fullest].rank} and rank {compared.ranks[int(np.nanargmin(compared.peaks[:, column]))].rank}."
    )


def _where(rank: RankPeaks, stretch: int) -> str:
    return f"{rank.phases[rank.phase[stretch]] or 'other'} of step {rank.step[stretch]}"


def _table(compared: Compared) -> Any:
    places = range(len(compared.ranks))
    peaks = [int(np.nan_to_num(compared.peaks[place], nan=0).max()) for place in places]
    median = int(np.median(peaks))
    rows = []
    for place in sorted(places, key=lambda place: (-peaks[place], place)):
        rank, stretch = compared.ranks[place], compared.peak_stretch(place)
        button = _button(rank.rank)
        if stretch == NONE:
            rows.append([button, "", "", "no operators here", "", ""])
            continue
        largest = fill_of(rank.categories[rank.largest[stretch]])
        rows.append(
            [
                button,
                html.Span(format_bytes(peaks[place]), title=f"{peaks[place]:,} bytes"),
                format_bytes_change(peaks[place] - median),
                _where(rank, stretch),
                [html.Span(className="swatch", style={"background": largest.colour}), parts.name(largest.label, 40)],
                format_bytes(int(rank.largest_bytes[stretch])),
            ]
        )
    heads = ["rank", ">peak", ">vs median", "where", "largest category", ">its bytes"]
    return parts.table(heads, rows, label="peaks of the ranks in the visible range")
