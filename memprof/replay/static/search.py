"""Offsets for lives that are hard to place: a search below what the heuristics find, for as long as there is time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from memprof.replay.static.intervals import Intervals
from memprof.replay.static.offsets import Placement
from memprof.replay.static.packing import LimitReachedError, pack
from memprof.replay.static.sections import Sections

#: Steps with more storages are not searched: a single placement of all of them takes seconds.
MOST_SEARCHED = 4_000
#: Where between the bound and the best height a search aims, in turn: a lower height excludes more choices early.
_AIMS = (0.0, 0.4, 0.7, 0.9)
#: Nodes of an attempt in a random order, for each life.
_NODES_PER_LIFE = 3


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
