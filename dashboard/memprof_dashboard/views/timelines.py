"""The timelines of the first screen: of one recording, and of a second one below or over it; also as rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memprof.errors import MemprofError
from memprof.replay.history import History
from memprof.trace.schema import Floats, Ints
from memprof_dashboard.figures.shared import draw, message
from memprof_dashboard.figures.timeline import timeline
from memprof_dashboard.figures.timeline_marks import Marks, Overlaid
from memprof_dashboard.page import theme_of
from memprof_dashboard.palette import fill_of
from memprof_dashboard.rank import Rank
from memprof_dashboard.sources import Workspace
from memprof_dashboard.state import View, clock_of, shown
from memprof_dashboard.summary_bar import budget_of, hover_text, phase_of
from memprof_dashboard.views.groups import storages_found

#: Value of the view for a second recording that is drawn over the first; otherwise it is below.
OVER = "over"


def has_two(view: View) -> bool:
    """Returns whether a second recording has a timeline of its own, below the first."""
    return view.other >= 0 and view.lay != OVER


def stretches(workspace: Workspace, view: View) -> list[tuple[History, int, int]]:
    """Returns what the timelines show: each recording with the first operator of its range and the end."""
    rank = workspace.rank(view.trace, view.rank)
    now = shown(view, rank)
    found = [(rank.history, now.first, now.end)] if rank.history.ops else []
    beside = workspace.rank(view.other, view.rank) if has_two(view) else None
    if beside is not None and beside.history.ops:
        if not found:
            return [(beside.history, 0, beside.history.ops)]
        aligned = _align(rank, beside, now.first, now.end)
        found.append((beside.history, aligned.first, aligned.end))
    return found


def held_at(history: History, at: int) -> dict[str, int]:
    """Returns the bytes of each category during an operator."""
    return {name: int(history.alive_bytes(name, np.array([at]))[0]) for name in history.categories}


def on_axis(rank: Rank, view: View) -> Callable[[Any], Any]:
    """Returns what turns operators, or places between them, into places on the timeline's x axis."""
    clock = clock_of(view, rank)
    if clock is None:
        return lambda places: places
    return lambda places: np.interp(places, np.arange(len(clock)), clock)


def main_timeline(workspace: Workspace, view: View, at: int, theme: Any) -> Any:
    """Draws the selected recording.

    Args:
        workspace: The open recordings.
        view: The view; its second recording shares the scale, and is a line over the areas where it is overlaid.
        at: The operator under the cursor, negative for the view's own.
        theme: Name of the theme.
    """
    rank = workspace.rank(view.trace, view.rank)
    history, now = rank.history, shown(view, rank)
    if not history.ops:
        return _nothing(theme)
    if rank.is_end_state:
        return message("No history was recorded: only what is in use at the end is known.", theme_of(theme))
    is_above, to_x = has_two(view), on_axis(rank, view)
    at = at if at >= 0 else now.at
    most, overlaid = 0, [*_predicted(workspace, rank, view)]
    if view.other >= 0:
        beside = workspace.rank(view.other, view.rank)
        if beside.history.ops and view.lay == OVER:
            name, ink = workspace.source(view.other).name, theme_of(theme).ink
            overlaid.insert(0, _laid_over(rank, beside, now.first, now.end, name, ink))
        elif beside.history.ops:
            aligned = _align(rank, beside, now.first, now.end)
            most = max(int(beside.history.total[aligned.first : aligned.end].max()), _capacity(beside))
    found = storages_found(rank, view.find)
    searched: Ints | None = None if found is None else history.bytes_of(found)
    marks = Marks(
        at=float(to_x(at + 0.5)),
        budget_bytes=budget_of(view.budget, int(history.total.max())),
        capacity_bytes=_capacity(rank),
        most_bytes=most,
        device=_device(rank),
        searched=searched,
        overlaid=tuple(replace(one, edges=to_x(one.edges)) for one in overlaid),
        told=lambda op_id: hover_text(rank, op_id),
        title=workspace.source(view.trace).name if is_above else "",
        has_legend=False,
        **_axis_of(rank, view),
    )
    return timeline(history, now.first, now.end, theme_of(theme), marks)


def _axis_of(rank: Rank, view: View) -> dict[str, Any]:
    """Returns the fields of ``Marks`` for the x axis of a recording of its own."""
    clock, now = clock_of(view, rank), shown(view, rank)
    if clock is None:
        return {}
    return {"clock": clock, "place": lambda ops: clock[ops], "axis": (float(clock[now.first]), float(clock[now.end]))}


def _predicted(workspace: Workspace, rank: Rank, view: View) -> list[Overlaid]:
    """Returns the line of the view's plan; none without one, or where it cannot be predicted."""
    if not view.plan:
        return []
    from memprof_dashboard.whatif.draft import draft_of, predicted_line

    try:
        made = draft_of(rank, view.plan, workspace.dry_frames)
    except MemprofError:
        return []  # the what-if page says why
    if made is None:
        return []
    now = shown(view, rank)
    edges, during = predicted_line(rank, made)
    first = max(int(np.searchsorted(edges, now.first, side="right")) - 1, 0)
    end = min(int(np.searchsorted(edges, now.end, side="left")), len(during))
    if first >= end:
        return []  # another step is shown
    drawn = draw(during, first, end)
    return [Overlaid("with the plan", edges[np.append(drawn.left, end)], during[drawn.op_ids])]


def other_timeline(workspace: Workspace, view: View, at: int, theme: Any) -> Any:
    """Draws the second recording, on both axes of the first, with its cursor; arguments as for ``main_timeline``."""
    rank, beside = workspace.rank(view.trace, view.rank), workspace.rank(view.other, view.rank)
    now = shown(view, rank)
    if not beside.history.ops:
        return _nothing(theme)
    name = workspace.source(view.other).name
    if not rank.history.ops:
        return timeline(beside.history, 0, beside.history.ops, theme_of(theme), Marks(title=name, has_legend=False))
    aligned = _align(rank, beside, now.first, now.end)
    heights = [one.heights for one in _predicted(workspace, rank, view)]
    most = max(int(values.max()) for values in (rank.history.total[now.first : now.end], *heights))
    to_x = on_axis(rank, view)
    marks = Marks(
        at=float(to_x((at if at >= 0 else now.at) + 0.5)),
        budget_bytes=budget_of(view.budget, int(rank.history.total.max())),
        capacity_bytes=_capacity(beside),
        most_bytes=max(most, _capacity(rank)),
        device=_device(beside),
        title=name,
        has_legend=False,
        told=lambda op_id: f"operator {op_id:,}",
        clock=None if clock_of(view, rank) is None else beside.clock,
        place=lambda ops: to_x(aligned.place(ops)),
        cuts=aligned.cuts,
        axis=(float(to_x(now.first)), float(to_x(now.end))),
    )
    return timeline(beside.history, aligned.first, aligned.end, theme_of(theme), marks)


def _stretch_of(beside: Rank, rank: Rank, first: int, end: int) -> tuple[int, int]:
    """Returns the matching range of another recording: the steps of the same numbers, or all of it."""
    steps = rank.history.step[first:end]
    if not len(steps):
        return 0, beside.history.ops
    low, high = int(steps.min()), int(steps.max())
    inside = np.flatnonzero((beside.history.step >= low) & (beside.history.step <= high))
    return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, beside.history.ops)


@dataclass(frozen=True)
class _Aligned:
    """A range of another recording, aligned with a range of this one.

    Steps of the same number lie on each other, and so do their phases where both run the same ones.

    Attributes:
        first: First operator of the other recording in it.
        end: End of the range (exclusive).
        place: Returns where its operators lie on this recording's axis.
        cuts: Its operators that begin a step or a phase there.
    """

    first: int
    end: int
    place: Callable[[Ints], Floats]
    cuts: Ints


def _align(rank: Rank, beside: Rank, first: int, end: int) -> _Aligned:
    """Lays another recording on the axis of a range."""
    own, others = _anchors(rank, beside, first, end)
    low, high = np.interp([first, end], own, others)
    start = min(int(low), beside.history.ops - 1)
    stop = max(int(np.ceil(high)), start + 1)

    def place(op_ids: Ints) -> Floats:
        places: Floats = np.clip(np.interp(op_ids, others, own), first, end)
        return places

    return _Aligned(start, stop, place, others.astype(np.int64))


def _laid_over(rank: Rank, beside: Rank, first: int, end: int, name: str, colour: str) -> Overlaid:
    """Returns the line of another recording over a range."""
    aligned = _align(rank, beside, first, end)
    drawn = draw(beside.history.total, aligned.first, aligned.end, cuts=aligned.cuts)
    edges = aligned.place(np.append(drawn.left, aligned.end))
    return Overlaid(name, edges, beside.history.total[drawn.op_ids], colour)


def _anchors(rank: Rank, beside: Rank, first: int, end: int) -> tuple[Floats, Floats]:
    """Returns operators of a recording and those of another that lie at the same place, both ascending."""
    stretches = _stretch_of(rank, rank, first, end), _stretch_of(beside, rank, first, end)
    runs = [_runs(one.history, *stretch) for one, stretch in zip((rank, beside), stretches, strict=True)]
    own, others = [], []
    for step in runs[0]:
        (starts, phases), (other_starts, other_phases) = runs[0][step], runs[1].get(step, ([], []))
        count = len(starts) if phases == other_phases else min(len(other_starts), 1)
        own += starts[:count]
        others += other_starts[:count]
    pairs = list(zip(stretches[0], stretches[1], strict=True))
    if not own or own[0] > pairs[0][0]:
        own, others = [pairs[0][0], *own], [pairs[0][1], *others]
    return np.array([*own, pairs[1][0]], dtype=np.float64), np.array([*others, pairs[1][1]], dtype=np.float64)


def _runs(history: History, first: int, end: int) -> dict[int, tuple[list[int], list[str]]]:
    """Returns where each run of operators of one phase begins, and its phase, by step."""
    step, phase = history.step[first:end], history.phase[first:end]
    starts = np.flatnonzero((np.diff(step) != 0) | (np.diff(phase) != 0)) + 1
    runs: dict[int, tuple[list[int], list[str]]] = {}
    for start in [0, *starts.tolist()]:
        own = runs.setdefault(int(step[start]), ([], []))
        own[0].append(first + start)
        own[1].append(history.phases[phase[start]])
    return runs


def _nothing(theme: Any) -> Any:
    return message("No operators were recorded.", theme_of(theme))


def _capacity(rank: Rank) -> int:
    """Returns the device's capacity where it is close enough to the peak to be drawn."""
    machine = rank.trace.manifest.machine
    if machine.device_kind == "cpu" or not rank.history.ops:
        return 0
    return machine.capacity_bytes if machine.capacity_bytes < 3 * int(rank.history.total.max()) else 0


def _device(rank: Rank) -> str:
    return rank.trace.manifest.machine.device_name or "device"


def rows_of(rank: Rank, view: View, most: int | None) -> tuple[list[str], list[list[Any]]]:
    """Returns the timeline's data as rows, limited to the ``most`` highest where it is set."""
    history, now = rank.history, shown(view, rank)
    if not history.ops:
        return ["operator"], []
    op_ids = draw(history.total, now.first, now.end).op_ids
    if most is not None and len(op_ids) > most:
        op_ids = np.sort(op_ids[np.argsort(history.total[op_ids], kind="stable")[-most:]])
    split = [history.alive_bytes(name, op_ids) for name in history.categories]
    heads = [
        ">operator",
        ">step",
        "phase",
        "name",
        ">total bytes",
        *(f">{fill_of(name).label}" for name in history.categories),
    ]
    rows = [
        [
            int(op_id),
            int(history.step[op_id]),
            phase_of(history, op_id),
            str(rank.op_names[op_id]),
            int(history.total[op_id]),
            *(int(values[row]) for values in split),
        ]
        for row, op_id in enumerate(op_ids.tolist())
    ]
    return heads, rows
