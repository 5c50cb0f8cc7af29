"""Finds which run of a forward operator its backward reads, in jobs that checkpoint activations themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.trace.schema import NONE, Bools, Ints

if TYPE_CHECKING:
    from memprof.trace.step import Step


def last_runs(step: Step, region: Ints, origin: Ints) -> Ints:
    """Returns the origin of each operator, a recomputed one where the job ran it again before backward reached it.

    A recording names the first run for both. The recomputed run is the one in the same module, at the same place among
    its operators of that name.

    Args:
        step: The step.
        region: The call of a model or recomputation each operator runs in, NONE outside; ``(ops,)``.
        origin: The forward operator that each goes back to, itself for forward operators; ``(ops,)``.
    """
    ops, ids = step.ops, np.arange(len(step.ops))
    is_again = ops.is_recompute & (region != NONE) & (ops.module_id != NONE)
    if not is_again.any():
        return origin
    names = np.unique(ops.name.astype(str), return_inverse=True)[1]
    key = ops.module_id * (names.max() + 1) + names
    is_first = (region != NONE) & ~ops.is_recompute & (ops.module_id != NONE)
    place, count = np.zeros_like(ids), np.zeros_like(ids)
    first = np.flatnonzero(is_first)
    place[first], count[first] = _places(key[first])
    again = np.flatnonzero(is_again)
    again = again[np.argsort(key[again], kind="stable")]
    run = np.unique(np.stack([key[again], region[again]]), axis=1, return_inverse=True)[1]
    start, length = np.unique(run, return_index=True, return_counts=True)[1:]

    reader = np.flatnonzero((ops.phase == "backward") & (region == NONE) & is_first[origin])
    given = origin[reader]
    span = len(ids) + 1
    before = np.searchsorted(key[again] * span + again, key[given] * span + reader) - 1
    is_found = (before >= 0) & (key[again[before]] == key[given])
    reader, given, of = reader[is_found], given[is_found], run[before[is_found]]
    # A module that ran several times is recomputed once for each; one that stopped early has other counts.
    is_whole = count[given] % length[of] == 0
    reader, given, of = reader[is_whole], given[is_whole], of[is_whole]
    found = origin.copy()
    found[reader] = again[start[of] + place[given] % length[of]]
    return found


def _places(key: Ints) -> tuple[Ints, Ints]:
    """Returns the place of each operator among those of its key, and how many these are."""
    order = np.argsort(key, kind="stable")
    _, start, inverse, counts = np.unique(key[order], return_index=True, return_inverse=True, return_counts=True)
    place = np.empty_like(key)
    place[order] = np.arange(len(key)) - start[inverse]
    count = np.empty_like(key)
    count[order] = counts[inverse]
    return place, count


def read_of_unfinished_runs(step: Step, region: Ints, forward: Ints, origin: Ints) -> Bools:
    """Returns which backward uses are of operators that a recomputation prepared and did not run, ``(uses,)``.

    A recomputation stops once all saved tensors are there: before the last product, whose operands it has cast.

    Args:
        step: The step.
        region: The call of a model or recomputation each operator runs in, NONE outside; ``(ops,)``.
        forward: The forward operator of each backward operator, ``(ops,)``.
        origin: The same, with what ``last_runs`` found; ``(ops,)``.
    """
    ops, uses = step.ops, step.uses
    is_again = ops.is_recompute & (region != NONE) & (ops.module_id != NONE)
    is_left = (ops.phase == "backward") & (forward != NONE) & (origin == forward) & (region == NONE)
    is_left &= ~ops.is_recompute[origin] & (ops.module_id[origin] != NONE)
    place = (
        uses.storage_id * len(step.modules) + ops.module_id[np.where(is_left, origin, np.arange(len(ops)))][uses.op_id]
    )
    found: Bools = is_left[uses.op_id] & (uses.role == "read") & np.isin(place, place[is_again[uses.op_id]])
    return found


def saved_by_unfinished_runs(step: Step, is_unfinished: Bools) -> Bools:
    """Returns which records are of what backward reads from such a recomputation, ``(saved,)``.

    Args:
        step: The step.
        is_unfinished: The uses that ``read_of_unfinished_runs`` found.
    """
    saved, uses, count = step.saved, step.uses, len(step.storages)
    read = uses.op_id[is_unfinished] * count + uses.storage_id[is_unfinished]
    is_one: Bools = np.isin(saved.released_op_id * count + saved.storage_id, read)
    return is_one
