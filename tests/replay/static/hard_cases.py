"""Minimalloc's hard placements as lives."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from memprof.replay.static.intervals import Intervals
from memprof.trace.schema import NONE

HARD_CASES = sorted((Path(__file__).parent / "minimalloc").glob("*.csv"))


def read_hard_case(path: Path) -> Intervals:
    """Returns the buffers of a file, over the times at which any starts or ends."""
    with path.open(newline="") as file:
        rows = np.array([[int(value) for value in row.values()] for row in csv.DictReader(file)])
    _, lower, upper, size = rows.T
    times = np.unique([lower, upper])
    return Intervals(
        first=np.searchsorted(times, lower),
        last=np.searchsorted(times, upper) - 1,
        size=size,
        storage_id=np.full(len(size), NONE, dtype=np.int64),
        is_fixed=np.zeros(len(size), dtype=np.bool_),
        ops=len(times),
    )
