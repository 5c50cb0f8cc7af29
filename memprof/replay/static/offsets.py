"""Assigns storages with known lives to offsets of one memory block, with a search for those hard to place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from memprof.replay.static.intervals import Intervals, Sections
from memprof.replay.static.packing import LimitReachedError, pack
from memprof.trace.schema import Ints

#: Chooses a gap: takes the starts and bytes of all gaps, returns the index of one.
_Choice = Callable[[Ints, Ints], int]
#: Steps with more storages are not searched: a single placement of all of them takes seconds.
MOST_SEARCHED = 4_000
#: Where between the bound and the best height a search aims, in turn: a lower height excludes more choices early.
_AIMS = (0.0, 0.4, 0.7, 0.9)
#: Nodes of an attempt in a random order, for each life.
_NODES_PER_LIFE = 3


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


def search_offsets(lives: Intervals, start: Placement, *, time_limit_s: float) -> Placement:
    """Searches for a lower placement than a known one.

    Depth-first searches below it alternate between fixed orders, with more and more nodes, and random ones with few:
    a search that goes wrong early rarely recovers, and the next may not go wrong at all.

    Args:
        lives: The lives.
        start: A placement of them, such as the better of the heuristics'.
        time_limit_s: Time after which the best so far is returned.

    Returns:
        The lowest found; ``start`` where that is at the bound, or there are more than MOST_SEARCHED lives.
    """
    deadline = time.monotonic() + time_limit_s
    best = start
    moved = np.flatnonzero(~lives.is_fixed)
    bottom = int(lives.size[lives.is_fixed].sum())
    bound = lives.lower_bound()
    if best.height <= bound or len(moved) > MOST_SEARCHED:
        return best
    sections = Sections.of(lives.first[moved], lives.last[moved], lives.size[moved])
    for order, nodes, aim in _attempts(sections):
        height = bound + int(aim * (best.height - bound))
        try:
            found = pack(order, height - bottom, nodes=nodes, deadline=deadline)
        except LimitReachedError:
            if time.monotonic() >= deadline:
                break
            continue
        if found is None:
            bound = height + 1
        else:
            offset = best.offset.copy()
            offset[moved[order.rows]] = bottom + found
            best = Placement(offset, int((offset + lives.size).max()))
        if best.height <= bound:
            break
    return best


def _attempts(sections: Sections) -> Iterator[tuple[Sections, int, float]]:
    """Yields orders, how many nodes to search in them, and where between the bound and the best height to aim."""
    fixed = _fixed_orders(sections)
    random = np.random.default_rng(0)
    nodes = len(sections)
    while True:
        nodes *= 2
        for aim in _AIMS:
            for order in fixed:
                yield order, nodes, aim
        few = _NODES_PER_LIFE * len(sections)
        for turn in range(len(fixed) * len(_AIMS) * nodes // few):
            yield sections.shuffled(random), few, _AIMS[turn % len(_AIMS)]


def _fixed_orders(sections: Sections) -> list[Sections]:
    """Returns the lives in orders of two kinds: the largest first, and those in the fullest sections first."""
    size, ops, fullest = sections.size, sections.ops, sections.fullest()
    area, spans = size * ops, sections.end - sections.first
    orders = (
        (ops, area, fullest),
        (fullest, area, ops),
        (fullest, ops, area),
        (area, ops, fullest),
        (spans, area, fullest),
    )
    # The last key of lexsort decides first.
    return [sections.take(np.lexsort([-measure for measure in reversed(order)])) for order in orders]
