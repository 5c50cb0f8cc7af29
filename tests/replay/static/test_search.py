"""Searched placements: valid, never above the heuristics', and as low as possible where that can be worked out."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.replay.static.intervals import Intervals, Sections
from memprof.replay.static.offsets import best_fit, greedy_by_size, search_offsets
from memprof.replay.static.packing import LimitReachedError, pack
from tests.replay.static.hard_cases import HARD_CASES, read_hard_case
from tests.replay.static.test_static import check

#: Solved to the bound within tenths of a second.
QUICK = [path for path in HARD_CASES if path.stem in "BCFH"]
LIVES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=6)


def lives_of(rows: list[tuple[int, int, int]], fixed: int = 0) -> Intervals:
    """Lives of a start, further operators and a size each; the first few may be fixed."""
    first, more, size = np.array(rows, dtype=np.int64).T
    is_fixed = np.arange(len(rows)) < fixed
    return Intervals(
        first=np.where(is_fixed, 0, first),
        last=np.where(is_fixed, 14, first + more),
        size=size,
        storage_id=np.arange(len(rows)),
        is_fixed=is_fixed,
        ops=15,
    )


def lowest(lives: Intervals) -> int:
    """The lowest height there is: the best of all orders, each life at the lowest offset above those before it."""
    best = lives.total()
    for order in itertools.permutations(range(len(lives))):
        top = 0
        offset = np.zeros(len(lives), dtype=np.int64)
        for place, row in enumerate(order):
            below = [
                other
                for other in order[:place]
                if lives.first[other] <= lives.last[row] and lives.last[other] >= lives.first[row]
            ]
            offset[row] = max((offset[other] + lives.size[other] for other in below), default=0)
            top = max(top, int(offset[row] + lives.size[row]))
        best = min(best, top)
    return best


def far() -> float:
    """A deadline that is not reached."""
    return time.monotonic() + 600


@settings(max_examples=40, deadline=None)
@given(LIVES)
def test_lives_are_packed_below_a_height_exactly_where_they_fit(rows: list[tuple[int, int, int]]) -> None:
    """At the lowest height of all orders the search finds offsets; below it, it proves that there are none."""
    lives = lives_of(rows)
    height = lowest(lives)
    sections = Sections.of(lives.first, lives.last, lives.size)
    found = pack(sections, height, nodes=10_000, deadline=far())
    assert found is not None
    ends = found + lives.size
    for row, other in itertools.combinations(range(len(lives)), 2):
        if lives.first[row] <= lives.last[other] and lives.last[row] >= lives.first[other]:
            assert found[row] >= ends[other] or found[other] >= ends[row]
    assert ends.max() <= height
    assert pack(sections, height - 1, nodes=10_000, deadline=far()) is None


@settings(max_examples=40, deadline=None)
@given(LIVES, st.integers(0, 2))
def test_a_search_ends_at_the_lowest_height(rows: list[tuple[int, int, int]], fixed: int) -> None:
    """Fixed lives stay at the bottom; the others are as low as any order places them."""
    lives = lives_of(rows, fixed)
    placed = search_offsets(lives, greedy_by_size(lives), time_limit_s=60)
    check(lives, placed)
    assert placed.height == lowest(lives)
    bottom = int(lives.size[lives.is_fixed].sum())
    assert (placed.offset[~lives.is_fixed] >= bottom).all()


@pytest.mark.parametrize("path", QUICK, ids=lambda path: path.stem)
def test_hard_cases_are_placed_at_the_bound(path: Path) -> None:
    """Minimalloc's: no method can place them lower; the heuristics are at least 17 % above."""
    lives = read_hard_case(path)
    start = min(greedy_by_size(lives), best_fit(lives), key=lambda placed: placed.height)
    assert start.height > 1.17 * lives.lower_bound()
    placed = search_offsets(lives, start, time_limit_s=60)
    check(lives, placed)
    assert placed.height == lives.lower_bound()


def test_without_time_the_known_placement_is_returned() -> None:
    """Nothing is lost by a search that cannot start."""
    lives = read_hard_case(HARD_CASES[0])
    start = greedy_by_size(lives)
    assert search_offsets(lives, start, time_limit_s=0) is start


def test_a_search_ends_when_its_nodes_are_used_up() -> None:
    """It does not say then that nothing fits."""
    lives = read_hard_case(HARD_CASES[0])
    with pytest.raises(LimitReachedError):
        pack(Sections.of(lives.first, lives.last, lives.size), lives.lower_bound(), nodes=20, deadline=far())


def test_sections_are_the_moments_no_other_moment_contains() -> None:
    """Of five operators, those with lives 0 and 1, and with 1 and 2, are enough."""
    sections = Sections.of(np.array([0, 1, 3]), np.array([2, 4, 4]), np.array([5, 6, 7]))
    assert sections.count == 2
    assert sections.first.tolist() == [0, 0, 1]
    assert sections.end.tolist() == [1, 2, 2]
    assert sections.total().tolist() == [11, 13]
    assert sections.crossing().tolist() == [1, 0]
    assert sections.fullest().tolist() == [11, 13, 13]
