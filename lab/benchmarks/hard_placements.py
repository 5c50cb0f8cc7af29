"""How low are static plans of placements known to be hard?"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from lab.benchmarks.section import Section, verdict
from memprof.replay.static.intervals import Intervals
from memprof.replay.static.offsets import Placement, best_fit, greedy_by_size, search_offsets
from tests.replay.static.hard_cases import HARD_CASES, read_hard_case

#: Seconds for each case.
LIMIT_S, QUICK_LIMIT_S = 60.0, 2.0
BAR_SHARE = 0.06
#: Height into which each case is known to fit.
KNOWN = 1 << 20


def measure(folder: Path, *, quick: bool) -> Section:
    """Searches for each of minimalloc's hard cases."""
    rows, worst = [], 0.0
    limit_s = QUICK_LIMIT_S if quick else LIMIT_S
    for path in HARD_CASES:
        lives = read_hard_case(path)
        bound = lives.lower_bound()
        largest, birth = greedy_by_size(lives), best_fit(lives)
        start = time.monotonic()
        placed = search_offsets(lives, min(largest, birth, key=lambda one: one.height), time_limit_s=limit_s)
        seconds = time.monotonic() - start
        _check(lives, placed)
        worst = max(worst, placed.height / bound - 1)
        heights = (largest.height, birth.height, placed.height, KNOWN)
        above = [f"{100 * (height / bound - 1):+.2f} %" for height in heights]
        rows.append((path.stem, str(len(lives)), *above, f"{seconds:.1f} s"))
    return Section(
        title="Hard placements",
        how=(
            "The eleven challenging cases of [minimalloc](https://github.com/google/minimalloc) (Moffitt 2023): height "
            "of the placement above the lower bound, which may not be reachable. A search ends at the bound, or after "
            f"{limit_s:.0f} s. known: the capacity given to minimalloc. Each placement is checked for overlaps."
        ),
        columns=("Case", "buffers", "largest first", "best fit", "search", "known", "time"),
        rows=tuple(rows),
        bar=verdict(f"search within {BAR_SHARE:.0%} of the bound", passed=worst <= BAR_SHARE),
    )


def _check(lives: Intervals, placed: Placement) -> None:
    """Raises where two lives that meet overlap, or the height is not that of the highest."""
    ends = placed.offset + lives.size
    for row in range(len(lives) - 1):
        rest = slice(row + 1, None)
        meets = (lives.first[rest] <= lives.last[row]) & (lives.last[rest] >= lives.first[row])
        if np.any(meets & (placed.offset[rest] < ends[row]) & (ends[rest] > placed.offset[row])):
            raise AssertionError("two buffers overlap")
    if placed.height != ends.max():
        raise AssertionError("the height is not that of the highest buffer")
