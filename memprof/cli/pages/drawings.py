"""Drawings for terminals: a step's timeline in block characters, the front of plans, and values as columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from rich.text import Text

from memprof.phases import in_order
from memprof.replay.live import live_bytes
from memprof.trace.schema import Ints
from memprof.trace.step import Step
from memprof.units import format_bytes, printable

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ROWS = 8
#: Columns left of the drawing, for its scale.
_SCALE = 11
_LEAST_COLUMNS = 24
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")


def draw_timeline(step: Step, width: int) -> list[Text]:
    """Draws the live bytes of a step, each column at its own maximum, with the peak marked and the phases below.

    Returns:
        Lines; none for a step without operators or a terminal that is too narrow.
    """
    columns = min(width - _SCALE - 1, len(step.ops))
    if columns < _LEAST_COLUMNS or not len(step.ops):
        return []
    edges = (np.arange(columns + 1) * len(step.ops)) // columns
    during = live_bytes(step).during
    highest = np.maximum.reduceat(during, edges[:-1])
    peak, most = int(during.argmax()), int(during.max())
    if most <= 0:
        return []
    column = int(np.searchsorted(edges, peak, side="right")) - 1
    phases = [str(step.ops.phase[low]) or "other" for low in edges[:-1].tolist()]
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(in_order(phases))}
    eighths = np.rint(highest * (8 * _ROWS) / most).astype(np.int64)
    label = f"peak {format_bytes(most)}"
    label = f"▼ {label}" if column + len(label) + 2 <= columns else f"{label} ▼"
    start = column if label.startswith("▼") else column - len(label) + 1
    lines = [Text(" " * (_SCALE + max(start, 0)) + label, style="bold")]
    for row in range(_ROWS, 0, -1):
        scale = format_bytes(most * row // _ROWS) if row in (_ROWS, _ROWS // 2) else ""
        line = Text(f"{scale:>{_SCALE - 2}} ▕", style="dim")
        for place, count in enumerate(eighths.tolist()):
            line.append(_EIGHTHS[min(max(count - 8 * (row - 1), 0), 8)], style=f"not dim {colours[phases[place]]}")
        lines.append(line)
    lines.append(_ruler(phases, colours))
    return lines


def _ruler(phases: Sequence[str], colours: dict[str, str]) -> Text:
    """Returns the names of the phases below their columns, as far as they have room."""
    starts = [0, *(place for place in range(1, len(phases)) if phases[place] != phases[place - 1]), len(phases)]
    line = Text(" " * _SCALE)
    for low, high in pairwise(starts):
        name = printable(phases[low])
        text = name.center(high - low - 1, "─") if len(name) < high - low else "─" * (high - low - 1)
        line.append(f"└{text}", style=colours[phases[low]])
    return line


def draw_front(points: Sequence[tuple[int, float]], budget_bytes: int, width: int) -> list[Text]:
    """Draws plans by peak and step time: the fronts of those that fit, and of those that do not.

    Args:
        points: Peak in bytes and step time relative to the recorded one, the recorded step first.
        budget_bytes: The budget, drawn as a vertical line.
        width: Columns of the terminal.

    Returns:
        Lines, the slowest plans on top; none for a terminal that is too narrow, or a single point.
    """
    columns, rows = min(width - _SCALE - 1, 72), 9
    if columns < _LEAST_COLUMNS or len(set(points)) < 2:
        return []
    peaks: Ints = np.array([*(peak for peak, _ in points), budget_bytes], dtype=np.int64)
    changes = np.array([change for _, change in points])
    low, high = int(peaks.min()), int(peaks.max())
    fastest, slowest = float(changes.min()), float(changes.max())
    x = np.rint((peaks - low) * (columns - 1) / max(high - low, 1)).astype(int)
    y = np.rint((changes - fastest) * (rows - 1) / max(slowest - fastest, 1e-9)).astype(int)
    cells = [[(" ", "")] * columns for _ in range(rows)]
    for each in cells:
        each[int(x[-1])] = ("┊", "red")
    for place in range(len(points) - 1, -1, -1):
        style = "bold" if place == 0 else "green" if peaks[place] <= budget_bytes else "dim"
        cells[int(y[place])][int(x[place])] = ("○" if place == 0 else "●", style)
    lines = []
    for row in range(rows - 1, -1, -1):
        change = {rows - 1: slowest, 0: fastest}.get(row)
        line = Text(f"{'' if change is None else f'{100 * change:+.1f} %':>{_SCALE - 2}} ▕", style="dim")
        for mark, style in cells[row]:
            line.append(mark, style=f"not dim {style}".strip())
        lines.append(line)
    ends = format_bytes(low), format_bytes(high)
    gap = max(columns - len(ends[0]) - len(ends[1]), 1)
    lines.append(Text(" " * _SCALE + ends[0] + " " * gap + ends[1], style="dim"))
    lines.append(Text(f"{' ' * _SCALE}○ recorded  ● plan  ┊ budget {format_bytes(budget_bytes)}", style="dim"))
    return lines


def draw_columns(
    values: Sequence[float], marks: Sequence[int], label: Callable[[float], str], width: int
) -> list[Text]:
    """Draws values as columns from 0, some of them marked below.

    Args:
        values: The values, none of them NaN or negative; where there are more than columns, each column shows the
            maximum of several.
        marks: Places of the values that are marked.
        label: Formats a value for the scale.
        width: Columns of the terminal.

    Returns:
        Lines; none for fewer than two values, or only zeros.
    """
    most = max(values, default=0.0)
    room = width - _SCALE - 1
    if len(values) < 2 or most <= 0 or room < _LEAST_COLUMNS:
        return []
    columns = min(len(values), room)
    wide = max(1, min(4, room // columns))
    edges = (np.arange(columns) * len(values)) // columns
    highest = np.maximum.reduceat(np.asarray(values, np.float64), edges)
    marked = set((np.searchsorted(edges, np.asarray(marks, np.int64), side="right") - 1).tolist()) if marks else set()
    eighths = np.rint(highest * (8 * _ROWS) / most).astype(np.int64).tolist()
    lines = []
    for row in range(_ROWS, 0, -1):
        scale = label(most * row / _ROWS) if row in (_ROWS, _ROWS // 2) else ""
        line = Text(f"{scale:>{_SCALE - 2}} ▕", style="dim")
        for place, count in enumerate(eighths):
            colour = "red" if place in marked else "cyan"
            line.append(_EIGHTHS[min(max(count - 8 * (row - 1), 0), 8)] * wide, style=f"not dim {colour}")
        lines.append(line)
    if marked:
        under = "".join(("▲" if place in marked else " ").ljust(wide) for place in range(columns))
        lines.append(Text(" " * _SCALE + under, style="red"))
    return lines
