"""What is marked on a timeline: the cursor, budget and device, steps, phases, and the peaks of its lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from memprof.replay.history import History
from memprof.trace.schema import Floats, Ints
from memprof.units import format_bytes
from memprof_dashboard.figures.shared import Drawn, across, escaped, note, pointer
from memprof_dashboard.palette import PHASE_COLOURS, RECOMPUTED, RECOMPUTED_COLOUR, Theme, ink_on, phase_colours

#: Positions on the x axis.
Places = npt.NDArray[np.int32] | npt.NDArray[np.uint16] | Floats

#: Maximum number of step boundaries marked.
_MOST_STEPS = 40
#: The end of the arrows to peaks.
_DOT = {"arrowhead": 6, "arrowsize": 0.7, "arrowwidth": 1.5}


@dataclass(frozen=True, eq=False)
class Overlaid:
    """A line over the areas: the total of another recording, or of a prediction, on this recording's axis.

    Attributes:
        name: What it is called.
        edges: Where each of its stretches begins, with the end behind the last, shape ``(stretches + 1,)``.
        heights: Bytes alive in each, shape ``(stretches,)``.
        colour: Its colour; "" for the theme's accent.
    """

    name: str
    edges: Floats
    heights: Ints
    colour: str = ""


def own_axis(op_ids: Ints) -> Places:
    """Returns where operators lie on the axis of their own recording: at their rows."""
    narrow: Places = op_ids.astype(np.uint16) if op_ids.max(initial=0) < 2**16 else op_ids.astype(np.int32)
    return narrow


@dataclass(frozen=True)
class Marks:
    """Markers on a timeline.

    Attributes:
        at: Where the cursor stands on the x axis, None for none.
        budget_bytes: Where the budget line is, 0 for none.
        capacity_bytes: Device capacity, 0 for none.
        most_bytes: Height of the y axis where it is shared with another figure, 0 for this figure's own.
        device: Name of the device, for its line.
        searched: Live bytes of the search matches during each operator, None without a search.
        told: What the hover says of an operator, by its row; None for the figures alone.
        overlaid: Lines over the areas, each with its peak marked.
        title: Title of the figure, "" for none.
        has_legend: Whether the categories are listed above it.
        place: Returns where operators lie on the x axis, ascending; at their rows unless the axis is that of another
            recording.
        cuts: Operators at which a column has to begin, None for none: a phase that is short here may be long there.
        axis: The range of the x axis where it is another recording's or time, None for that of the operators.
        clock: When each operator begins in ms, and the end, where the axis is time; shape ``(ops + 1,)``.
    """

    at: float | None = None
    budget_bytes: int = 0
    capacity_bytes: int = 0
    most_bytes: int = 0
    device: str = ""
    searched: Ints | None = None
    told: Callable[[int], str] | None = None
    overlaid: tuple[Overlaid, ...] = ()
    title: str = ""
    has_legend: bool = True
    place: Callable[[Ints], Places] = own_axis
    cuts: Ints | None = None
    axis: tuple[float, float] | None = None
    clock: Floats | None = None


def shapes(marks: Marks, history: History, drawn: Drawn, unit_bytes: int, theme: Theme) -> list[dict[str, object]]:
    """Returns the lines of the cursor, the budget and the capacity, and those between steps; the cursor's first."""
    first, end = marks.axis or (drawn.first, drawn.end)
    starts = _step_starts(history, drawn.first, drawn.end)
    steps = marks.place(starts[1:]).tolist()
    return [*limit_lines(marks, first, end, unit_bytes, theme), *_step_lines(steps, theme)]


def labels(
    marks: Marks, history: History, drawn: Drawn, edges: Places, top: int, unit_bytes: int, theme: Theme
) -> list[dict[str, object]]:
    """Returns the names of steps, phases and lines, and the peaks.

    Args:
        marks: What is marked.
        history: The recording.
        drawn: The operators that are drawn.
        edges: Where their columns begin on the x axis, with the end behind the last, shape ``(columns + 1,)``.
        top: The highest bytes on the axis.
        unit_bytes: Bytes of the axis' unit.
        theme: The page's colours.
    """
    first, end = marks.axis or (drawn.first, drawn.end)
    peak = peak_label(edges, history.total[drawn.op_ids], unit_bytes, theme)
    is_right = any(one["x"] > (first + end) / 2 for one in peak)
    starts = _step_starts(history, drawn.first, drawn.end)
    return [
        *_step_names(history, starts, marks.place(starts).tolist(), theme),
        *_phase_names(history, drawn, edges),
        *limit_names(marks, (first, "left") if is_right else (end, "right"), top, unit_bytes, theme),
        *peak,
        *(_overlaid_peak(line, (first + end) / 2, unit_bytes, theme) for line in marks.overlaid),
    ]


def limit_lines(marks: Marks, first: float, end: float, unit_bytes: int, theme: Theme) -> list[dict[str, object]]:
    """Returns the shapes of cursor, budget and capacity, the cursor first."""
    shapes: list[dict[str, object]] = [cursor_line(marks.at, theme)]
    for size, dash in ((marks.budget_bytes, "dash"), (marks.capacity_bytes, "longdashdot")):
        if size:
            y = size / unit_bytes
            line = {"color": theme.alarm, "width": 1.5, "dash": dash}
            shapes.append({"type": "line", "x0": first, "x1": end, "y0": y, "y1": y, "line": line})
    return shapes


def cursor_line(x: float | None, theme: Theme) -> dict[str, object]:
    """Returns the shape of the cursor, with zero width where there is none."""
    return across(x or 0, {"color": theme.accent, "width": 0 if x is None else 1.5})


def _phase_names(history: History, drawn: Drawn, edges: Places) -> list[dict[str, object]]:
    codes, columns = drawn.phase_runs(history)
    colours = phase_colours(history.phases)
    width = edges[-1] - edges[0]
    names = []
    for code, (left, right) in zip(codes.tolist(), pairwise(edges[columns].tolist()), strict=True):
        name = RECOMPUTED if code == len(history.phases) else history.phases[code] or "other"
        if right - left < width * (0.02 + 0.011 * len(name)):
            continue
        colour = RECOMPUTED_COLOUR if name == RECOMPUTED else colours.get(name, PHASE_COLOURS["other"])
        text = escaped(name, 40)
        names.append(note((left + right) / 2, 0.5, text, 10.5, ink_on(colour), yref="y2"))
    return names


def limit_names(
    marks: Marks, end: tuple[float, str], top: int, unit_bytes: int, theme: Theme
) -> list[dict[str, object]]:
    """Returns the labels of the budget and the device, at one end of their lines: the one away from the peak's label.

    Args:
        marks: What is marked.
        end: Where the lines end, and on which side.
        top: The highest bytes on the axis.
        unit_bytes: Bytes of the axis' unit.
        theme: The page's colours.
    """
    names = []
    gap = marks.capacity_bytes - marks.budget_bytes
    is_close = marks.capacity_bytes > 0 and 0 <= gap < 0.06 * top
    for size, label in ((marks.budget_bytes, "budget"), (marks.capacity_bytes, escaped(marks.device, 40) or "device")):
        if 0 < size <= 1.12 * top:
            is_below = is_close and size == marks.budget_bytes
            anchors = {"xanchor": end[1], "yanchor": "top" if is_below else "bottom"}
            text = f"{label} {format_bytes(size)}"
            names.append(note(end[0], size / unit_bytes, text, 11, theme.alarm, **anchors))
    return names


def _step_starts(history: History, first: int, end: int) -> Ints:
    """Returns the step boundaries inside a range; none where there are too many to distinguish."""
    step = history.step[first:end]
    starts = np.flatnonzero(np.diff(step)) + 1
    if len(starts) > _MOST_STEPS:
        return np.empty(0, dtype=np.int64)
    return first + np.concatenate(([0], starts)).astype(np.int64)


def _step_lines(places: Sequence[float], theme: Theme) -> list[dict[str, object]]:
    line = {"color": theme.faint, "width": 1, "dash": "dot"}
    return [across(x, line) for x in places]


def _step_names(history: History, starts: Ints, places: Sequence[float], theme: Theme) -> list[dict[str, object]]:
    corner = {"yref": "paper", "yanchor": "bottom", "xanchor": "left"}
    return [
        note(x, 1, f"step {history.step[start]}", 10, theme.ink, **corner)
        for start, x in zip(starts.tolist(), places, strict=True)
    ]


def peak_label(edges: Places, total: Ints, unit_bytes: int, theme: Theme) -> list[dict[str, Any]]:
    """Returns the label of the highest of some bytes, shape ``(columns,)``, at its column's left edge."""
    if not len(total):
        return []
    place = int(total.argmax())
    x, middle = edges[place].item(), float(edges[0]) / 2 + float(edges[-1]) / 2
    text, by = f"peak {format_bytes(int(total[place]))}", (56 if x < middle else -56, -12)
    look = {"bgcolor": theme.ink, "borderpad": 3, "font": {"color": theme.paper, "size": 11.5}}
    return [pointer(x, float(total[place] / unit_bytes), text, theme, by, **_DOT, **look)]


def _overlaid_peak(line: Overlaid, middle: float, unit_bytes: int, theme: Theme) -> dict[str, object]:
    place = int(line.heights.argmax())
    x, size = float(line.edges[place]), int(line.heights[place])
    colour = line.colour or theme.accent
    text, by = f"{escaped(line.name, 24)} {format_bytes(size)}", (70 if x < middle else -70, -14)
    look = {"arrowcolor": colour, "bordercolor": colour, "borderpad": 2, "font": {"color": theme.ink, "size": 11}}
    return pointer(x, size / unit_bytes, text, theme, by, **_DOT, **look)
