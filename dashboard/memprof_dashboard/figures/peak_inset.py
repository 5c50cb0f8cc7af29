"""An inset that enlarges the operators around a peak too narrow to see, where the timeline has room for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.replay.history import History
from memprof_dashboard.figures.shared import Drawn
from memprof_dashboard.figures.timeline_marks import Marks, Places

#: Widest peak that needs it, and its own width, as fractions of the axis; its least and largest height, of the plot's.
_NARROW, _WIDTH, _LEAST, _MOST = 0.02, 0.3, 0.16, 0.45
#: What the peak's label covers on its side; and the factor by which a peak exceeds all else.
_LABEL, _HIGHER = 0.34, 1.05
#: Fewest operators on each side of the peak, and most shown.
_FEWEST, _MOST_OPS = 6, 300


@dataclass(frozen=True)
class Inset:
    """The operators that it shows, and where it lies.

    Attributes:
        first: First operator.
        end: End of the range (exclusive).
        x: Its left and right edge, as fractions of the axis.
        y: Its lower and upper edge, as fractions of the plot's height.
        peak: Where the peak lies, as fractions of both.
    """

    first: int
    end: int
    x: tuple[float, float]
    y: tuple[float, float]
    peak: tuple[float, float]


def find_inset(history: History, drawn: Drawn, marks: Marks, edges: Places, top: float) -> Inset | None:
    """Finds the range and place of an inset; None where the peak is wide enough, or nowhere is room.

    Args:
        history: The recording.
        drawn: The operators that are drawn.
        marks: What is marked: an inset covers no line.
        edges: Where their columns begin on the x axis, with the end behind the last, shape ``(columns + 1,)``.
        top: Bytes at the upper end of the y axis.
    """
    total = history.total[drawn.op_ids]
    if marks.overlaid or marks.title or not top or not len(total) or edges[-1] <= edges[0]:
        return None
    shares = (edges - edges[0]) / float(edges[-1] - edges[0])
    place = int(total.argmax())
    at, height = float(shares[place]), float(total[place] / top)
    is_near = (shares[1:] > at - _NARROW / 2) & (shares[:-1] < at + _NARROW / 2)
    base = int(total[~is_near].max(initial=0))
    if not base or total[place] < _HIGHER * base:
        return None
    high = np.flatnonzero(is_near & (total > (base + int(total[place])) / 2))  # at half its height: it may end a slope
    if shares[high[-1] + 1] - shares[high[0]] > _NARROW:
        return None
    peak = int(drawn.op_ids[place])
    run = np.flatnonzero(history.total[drawn.first : drawn.end] > (base + int(total[place])) / 2) + drawn.first
    run = run[abs(run - peak) < _MOST_OPS // 3]
    margin = max(2 * len(run), _FEWEST)
    first, end = max(int(run[0]) - margin, drawn.first), min(int(run[-1]) + margin + 1, drawn.end)
    lines = [size / top for size in (marks.budget_bytes, marks.capacity_bytes) if size]
    label = (at - 0.02, at + _LABEL) if at < 0.5 else (at - _LABEL, at + 0.02)
    best = None
    for left in np.arange(0.02, 0.99 - _WIDTH, 0.04).tolist():
        right = left + _WIDTH
        is_below = (shares[1:] > left - 0.02) & (shares[:-1] < right + 0.02)
        floors = [float(total[is_below].max(initial=0)) / top, *lines]
        if left < label[1] and right > label[0]:
            floors += [height - 0.05, height + 0.06]
        for floor in floors:
            roof = min([1.0, *(one for one in floors if one > floor)])
            room = roof - floor - 0.06
            if floor >= floors[0] and room >= _LEAST and (best is None or min(room, _MOST) > best[0] + 0.02):
                y = floor + 0.03
                best = min(room, _MOST), (left, right), (y, y + min(room, _MOST))
    return None if best is None else Inset(first, end, best[1], best[2], (at, height))
