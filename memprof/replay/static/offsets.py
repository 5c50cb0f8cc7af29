"""Assigns storages with known lives to offsets of one memory block, so that no two live at once overlap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from memprof.replay.static.intervals import Intervals
from memprof.trace.schema import Ints

#: Chooses a gap: takes the starts and bytes of all gaps, returns the index of one.
_Choice = Callable[[Ints, Ints], int]


@dataclass(frozen=True, eq=False)
class Placement:
    """The offset of each life.

    Attributes:
        offset: Offset of each in bytes, shape ``(lives,)``.
        height: Total bytes.
    """

    offset: Ints
    height: int


def greedy_by_size(lives: Intervals) -> Placement:
    """Places the largest first, each at the lowest offset that is free for its whole life.

    Source: Pisarchyk & Lee 2020, Efficient Memory Management for Deep Neural Net Inference, section 5.2, which takes
    the smallest gap; the lowest is what their successors do, and of equal sizes the longest life goes first.
    """
    order = np.lexsort((lives.first, lives.first - lives.last, -lives.size))
    return _place(lives, order, lambda starts, sizes: 0)


def best_fit(lives: Intervals) -> Placement:
    """Places in order of birth, each in the smallest gap that is free for its whole life.

    Source: Sekiyama, Imai, Negishi & Kawachiya 2018, Profile-guided memory optimization for deep neural networks,
    section 4; among lives that start together, the longest goes first.
    """
    order = np.lexsort((-lives.size, -lives.last, lives.first))
    return _place(lives, order, lambda starts, sizes: int(sizes.argmin()))


def _place(lives: Intervals, order: Ints, choose: _Choice) -> Placement:
    """Places lives one after the other, fixed ones at the bottom."""
    offset = np.zeros(len(lives), dtype=np.int64)
    fixed = np.flatnonzero(lives.is_fixed)
    sizes = lives.size[fixed]
    offset[fixed] = np.cumsum(sizes) - sizes
    bottom = int(sizes.sum())
    order = order[~lives.is_fixed[order]]
    first, last, size = lives.first[order], lives.last[order], lives.size[order]
    # Columns of the placed lives, in order of placement.
    starts, ends = np.zeros(len(order), dtype=np.int64), np.zeros(len(order), dtype=np.int64)
    for row in range(len(order)):
        meets = (first[:row] <= last[row]) & (last[:row] >= first[row])
        below = _lowest_or_chosen(starts[:row][meets], ends[:row][meets], int(size[row]), bottom, choose)
        starts[row], ends[row] = below, below + size[row]
    offset[order] = starts
    return Placement(offset, int(max(bottom, ends.max(initial=0))))


def _lowest_or_chosen(starts: Ints, ends: Ints, size: int, bottom: int, choose: _Choice) -> int:
    """Returns an offset at which a size is free between some ranges: a chosen gap, or above them all."""
    if not len(starts):
        return bottom
    order = np.argsort(starts)
    reached = np.maximum.accumulate(np.concatenate([[bottom], ends[order]]))
    gaps = starts[order] - reached[:-1]
    fits = np.flatnonzero(gaps >= size)
    if not len(fits):
        return int(reached[-1])
    return int(reached[fits[choose(reached[fits], gaps[fits])]])
