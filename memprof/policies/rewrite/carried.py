"""Pairs what a step leaves to the next one with what the step before left to it."""

from __future__ import annotations

import numpy as np

from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step


def carried_over(step: Step, is_made: Bools) -> tuple[Ints, Ints]:
    """Pairs storages that outlive the iteration with those of the previous iteration that this one freed.

    Returns:
        For each surviving storage, its older counterpart; for each of those, the reverse. Shape (storages,) each, NONE
        without.
    """
    storages = step.storages
    left, found = np.full(len(storages), NONE, dtype=np.int64), np.full(len(storages), NONE, dtype=np.int64)
    outlives = np.flatnonzero(is_made & (storages.freed_op_id == NONE))
    waiting: dict[int, list[int]] = {}
    is_old = (storages.created_op_id == NONE) & (storages.freed_op_id != NONE) & (storages.category != "gradient")
    for row in np.flatnonzero(is_old)[::-1].tolist():
        waiting.setdefault(int(storages.requested_bytes[row]), []).append(row)
    for row in outlives.tolist():
        alike = waiting.get(int(storages.requested_bytes[row]))
        if alike:
            left[row] = alike.pop()
            found[left[row]] = row
    return left, found
