"""Finds which storages of a recorded step can be dropped and recomputed: forward's, kept by autograd."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.policies.rewrite.stack_marks import is_in_transform
from memprof.replay.directed import cycle_of
from memprof.replay.time import op_cost_us
from memprof.trace.schema import NONE, Bools, Floats, Ints
from memprof.trace.step import Step

_LASTING = ("parameter", "buffer", "gradient", "optimizer_state", "input")
_STATISTICS = ("batch_norm", "instance_norm")


@dataclass(frozen=True, eq=False)
class Units:
    """The storages of a step as the runtime treats them. Columns are of shape ``(storages,)``, except cost.

    A storage is recomputed by all operators that wrote it in forward, in order, which need their inputs.

    Attributes:
        may_go: Whether it may be dropped: autograd keeps it, and repeatable operators computed it.
        can_recompute: Whether repeatable operators computed it, kept or not.
        held: Last operator up to which something besides backward nodes holds it.
        makers: Operators that write each storage.
        sources: Other storages that those operators read.
        cost_us: Time of each operator when recomputed, shape ``(ops,)``.
    """

    may_go: Bools
    can_recompute: Bools
    held: Ints
    makers: dict[int, list[int]]
    sources: dict[int, list[int]]
    cost_us: Floats


def units_of(step: Step) -> Units:
    """Reads the units from a step."""
    ops, storages, uses = step.ops, step.storages, step.uses
    created, freed = storages.created_op_id, storages.freed_op_id
    total = len(ops)
    is_forward = (ops.phase == "forward") & ~ops.is_recompute & (ops.kind == "compute")
    is_own = (created != NONE) & ~np.isin(storages.category, _LASTING) & (storages.allocated_bytes > 0)
    is_own[is_own] = is_forward[created[is_own]]
    # Storages that backward writes cannot be recomputed.
    writes = uses.role != "read"
    late = writes & ~is_forward[uses.op_id]
    is_own[uses.storage_id[late]] = False

    makers: dict[int, list[int]] = {}
    reads: dict[int, list[int]] = {}
    for op_id, storage, role in zip(uses.op_id.tolist(), uses.storage_id.tolist(), uses.role.tolist(), strict=True):
        if role == "read":
            reads.setdefault(op_id, []).append(storage)
        elif is_own[storage]:
            makers.setdefault(storage, []).append(op_id)
    for storage in np.flatnonzero(is_own).tolist():
        first = int(created[storage])
        if first not in makers.setdefault(storage, []):
            makers[storage].insert(0, first)
    sources = {
        storage: list(dict.fromkeys(s for op_id in made_by for s in reads.get(op_id, ()) if s != storage))
        for storage, made_by in makers.items()
    }

    is_own &= ~cannot_be_remade(sources, np.where(freed == NONE, total, freed))

    last = _last_of_nodes(step)
    saved = step.saved
    by_node = last[saved.forward_op_id] != NONE
    kept_until = np.full(len(storages), NONE, dtype=np.int64)
    np.maximum.at(kept_until, saved.storage_id[by_node], last[saved.forward_op_id[by_node]])
    held = _held(step)
    # If it is freed after the last node releases it, something else holds it all along.
    lives = np.where(freed == NONE, total, freed)
    held = np.where(lives > kept_until, lives, held)
    # Torch shows the runtime nothing that is saved there, nor what hooks of the job take.
    is_unseen = (is_in_transform(step) | step.ops.is_hooked)[saved.forward_op_id]
    held[saved.storage_id[is_unseen]] = lives[saved.storage_id[is_unseen]]
    return Units(is_own & (kept_until != NONE) & (held < lives), is_own, held, makers, sources, op_cost_us(step))


def cannot_be_remade(sources: dict[int, list[int]], lives: Ints) -> Bools:
    """Returns which storages depend on contents that no longer exist, ``(storages,)``.

    An example is a table filled from itself, row by row, and the storages in between: its earlier contents are gone.
    Storages computed from such a table that outlive it also qualify.

    Args:
        sources: Storages that each storage is computed from.
        lives: Operators after which the storages are freed, ``(storages,)``.
    """
    pairs = [(storage, source) for storage, needed in sources.items() for source in needed]
    storages, needed = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    label = cycle_of(storages, needed, len(lives))
    is_lost: Bools = np.bincount(label, minlength=1)[label] > 1
    is_outlived = lives[needed] < lives[storages]
    while True:
        dependants = storages[is_outlived & is_lost[needed] & ~is_lost[storages]]
        if not len(dependants):
            return is_lost
        is_lost[dependants] = True


def _last_of_nodes(step: Step) -> Ints:
    """Returns the last operator of each forward operator's backward node, NONE where it has none."""
    ops = step.ops
    rows = np.flatnonzero((ops.forward_op_id != NONE) & ~ops.is_recompute & (ops.phase == "backward"))
    last = np.full(len(ops) + 1, NONE, dtype=np.int64)
    last[ops.forward_op_id[rows]] = rows
    return last


def _held(step: Step) -> Ints:
    """Returns the last operator up to which anything but the backward nodes that saved it holds each storage."""
    ops, storages, uses, calls = step.ops, step.storages, step.uses, step.module_calls
    count = len(storages)
    held = np.where(storages.created_op_id == NONE, 0, storages.created_op_id)
    pairs = np.unique(step.saved.forward_op_id * count + step.saved.storage_id)
    node = ops.forward_op_id[uses.op_id]
    by_packer = (node != NONE) & np.isin(node * count + uses.storage_id, pairs)
    np.maximum.at(held, uses.storage_id[~by_packer], uses.op_id[~by_packer])
    # A call's frames hold its arguments until it returns.
    calls_run = np.flatnonzero((calls.first_op_id != NONE) & (calls.last_op_id != NONE) & ~calls.is_recompute)
    order = np.argsort(uses.op_id, kind="stable")
    use_op, use_storage = uses.op_id[order], uses.storage_id[order]
    for call in calls_run.tolist():
        first, last = int(calls.first_op_id[call]), int(calls.last_op_id[call])
        low, high = np.searchsorted(use_op, [first, last + 1])
        touched = np.unique(use_storage[low:high])
        given = touched[storages.created_op_id[touched] < first]
        held[given] = np.maximum(held[given], last)
    return held
