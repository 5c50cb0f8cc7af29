"""Rewrites a step in which optimizer state or parameters are in memory during given operators only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.rewrite.draft import Draft
from memprof.policies.rewrite.insertion import SWAP_IN, SWAP_OUT
from memprof.policies.swap.copies import FETCH_US, SEND_US, copy_ops, link_of, longer_us
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.swap.policy import Swap


def can_move(step: Step, policy: Swap, category: str) -> Bools:
    """Returns which storages of a category are in memory all through the step and large enough, ``(storages,)``."""
    storages = step.storages
    is_there = (storages.created_op_id == NONE) & (storages.freed_op_id == NONE)
    is_large = storages.requested_bytes >= max(policy.minimum_bytes, 1)
    is_movable: Bools = (storages.category == category) & is_there & is_large
    return is_movable


def with_stays(
    step: Step,
    policy: Swap,
    at: Ints,
    start: Ints,
    end: Ints,
    is_changed: Bools,
    *,
    moved: Ints | None = None,
) -> Step:
    """Replaces storages that were always in memory by intervals (stays).

    Args:
        step: The step.
        policy: The settings.
        at: The storage of each stay.
        start: The operator before which it begins.
        end: The operator after which it ends.
        is_changed: Whether it is copied out at its end; otherwise the outside copy is still valid.
        moved: All storages that are out otherwise, those of ``at`` by default.
    """
    draft = Draft(step)
    like = np.minimum(start, len(step.ops) - 1)
    link = link_of(step, policy)
    ins = copy_ops(step, start, at, like, SWAP_IN, link.in_bytes_per_us)
    in_ids = draft.insert_ops(ins, start)
    changed = np.flatnonzero(is_changed)
    outs = copy_ops(step, end[changed] + 1, at[changed], end[changed], SWAP_OUT, link.out_bytes_per_us)
    out_ids = draft.insert_ops(outs, end[changed] + 1)
    last = end.copy()
    last[changed] = out_ids
    stays = draft.copy_storages(at, in_ids, last)
    draft.redirect_uses(at, stays, in_ids, last)
    draft.use(in_ids, stays, "write")
    draft.use(out_ids, stays[changed], "read")
    moved = np.unique(at) if moved is None else moved
    draft.remove_storages(moved)
    # Training waits for every copy: the first copy back overlaps with nothing, and changes must be out to be freed.
    copies_us = float(ins.duration_us.sum() + outs.duration_us.sum())
    draft.duration_us += longer_us(step, policy, FETCH_US * len(ins) + SEND_US * len(outs), copies_us)
    return draft.build()


def update_of(step: Step, storages: Ints) -> tuple[Ints, Ints]:
    """Returns the first and the last operator of the update that uses each storage, by default of the first update."""
    is_update = step.ops.phase == "optimizer"
    edges = np.diff(np.concatenate([[False], is_update, [False]]).astype(np.int64))
    first, last = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
    if not len(first):
        raise PolicyError("The step has no optimizer update, so it does not show when state and parameters are used.")
    uses = step.uses
    inside = is_update[uses.op_id]
    used = np.full(len(step.storages), NONE, dtype=np.int64)
    used[uses.storage_id[inside][::-1]] = uses.op_id[inside][::-1]
    number = np.maximum(np.searchsorted(first, used[storages], side="right") - 1, 0)
    return first[number], last[number]


def joined(*stays: tuple[Ints, Ints, Ints]) -> tuple[Ints, Ints, Ints]:
    """Returns stays of several kinds, each a storage, a start and an end; those of one storage that overlap are one."""
    at, start, end = (np.concatenate(columns) for columns in zip(*stays, strict=True))
    order = np.lexsort((start, at))
    at, start, end = at[order], start[order], end[order]
    rows: list[int] = []
    for row in range(len(at)):
        if rows and at[rows[-1]] == at[row] and start[row] <= end[rows[-1]]:
            end[rows[-1]] = max(end[rows[-1]], end[row])
        else:
            rows.append(row)
    return at[rows], start[rows], end[rows]
