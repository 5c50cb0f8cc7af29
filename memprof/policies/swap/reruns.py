"""Finds regions of activation checkpointing in a step; their inputs are saved like any other tensor.

torch's checkpoint saves its arguments in an autograd node of its own, so hooks around the region see them, and
unpacks them before the region is recomputed. No operator of that node is recorded, so the inputs are inferred from
what the recomputation reads. They live until the last node inside the region has released its saved tensors.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from memprof.trace.operator_facts import DETACH
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step


@dataclass(frozen=True, eq=False)
class Reruns:
    """Inputs of recomputed regions, one row per pair of region and storage; each of shape ``(inputs,)``.

    Attributes:
        storage: The storage.
        first: First operator of the region in forward.
        last: Last operator of it that is recomputed.
        again: First operator of the recomputation.
        is_use: Uses of these storages by recomputations and by backward inside their regions, shape ``(uses,)``.
    """

    storage: Ints
    first: Ints
    last: Ints
    again: Ints
    is_use: Bools

    def cover(self, total: int) -> Bools:
        """Marks the operators of forward inside regions, shape ``(total,)``."""
        depth = np.zeros(total + 1, dtype=np.int64)
        regions = np.unique(np.stack([self.first, self.last + 1], axis=1), axis=0)
        np.add.at(depth, regions[:, 0], 1)
        np.subtract.at(depth, regions[:, 1], 1)
        is_inside: Bools = np.cumsum(depth)[:total] > 0
        return is_inside


def find_reruns(step: Step) -> Reruns:
    """Finds the storages that are inputs of recomputed regions."""
    ops, uses = step.ops, step.uses
    created, freed = step.storages.created_op_id, step.storages.freed_op_id
    made_before = np.zeros(len(created), dtype=np.bool_)
    is_made = created != NONE
    made_before[is_made] = (ops.phase[created[is_made]] == "forward") & ~ops.is_recompute[created[is_made]]
    is_use = ops.is_recompute[uses.op_id] & made_before[uses.storage_id]
    columns: list[tuple[int, int, int, int]] = []
    for run in _second_runs(step, made_before):
        begin, first, end = _region(step, run)
        rows = slice(*np.searchsorted(uses.op_id, (first, end + 1)))
        touched = np.unique(uses.storage_id[rows])
        # Storages created inside that still exist were kept by the region itself, invisible to hooks. Inputs live until
        # backward, even if the recomputation stops before it reads them.
        lasts = (freed[touched] == NONE) | (freed[touched] >= run.again)
        goes_in = touched[made_before[touched] & (created[touched] < begin) & lasts]
        columns += [(storage, first, max(first, run.last), run.again) for storage in goes_in.tolist()]
    storages, firsts, lasts, agains = np.array(columns, dtype=np.int64).reshape(-1, 4).T
    reruns = Reruns(storages, firsts, lasts, agains, is_use)
    # If a node reads a tensor that its forward operator did not save, the recomputation saved it. What an operator
    # inside saves is the checkpoint's own: what it unpacks, as reentrant checkpointing does before it runs again.
    node, width = ops.forward_op_id[uses.op_id], len(created)
    saved = step.saved.take(~(ops.is_recompute | reruns.cover(len(ops)))[step.saved.forward_op_id])
    is_saved = np.isin(node * width + uses.storage_id, saved.forward_op_id * width + saved.storage_id)
    is_use |= (node != NONE) & ~is_saved
    return dataclasses.replace(reruns, is_use=is_use & np.isin(uses.storage_id, storages))


@dataclass
class _Run:
    """A recomputation.

    Attributes:
        first: First operator of forward it repeats.
        last: Last operator of forward it repeats.
        again: Its own first operator.
        has_kept: Whether it omits operators that allocated something.
    """

    first: int
    last: int
    again: int
    has_kept: bool = False


def _second_runs(step: Step, made_before: Bools) -> list[_Run]:
    """Finds the recomputations, and the forward operators each repeats.

    Args:
        step: The step.
        made_before: Storages that forward created, shape ``(storages,)``.
    """
    ops = step.ops
    places: dict[tuple[str, int], list[int]] = defaultdict(list)
    keys = list(zip(ops.name.tolist(), ops.module_id.tolist(), strict=True))
    for op_id in np.flatnonzero((ops.phase == "forward") & ~ops.is_recompute).tolist():
        places[keys[op_id]].append(op_id)
    uses = step.uses.take(made_before[step.uses.storage_id])
    low = np.searchsorted(uses.op_id, np.arange(len(ops) + 1)).tolist()
    makes = np.zeros(len(ops), dtype=np.bool_)
    makes[step.storages.created_op_id[made_before]] = True
    runs: list[_Run] = []
    # What the recomputation saves is detached in between.
    counts = np.cumsum(ops.is_recompute | (ops.name != DETACH)).tolist()
    before = NONE
    for op_id in np.flatnonzero(ops.is_recompute).tolist():
        candidates = places.get(keys[op_id], [])
        position = bisect_right(candidates, runs[-1].last) if runs else 0
        if before == counts[op_id] - 1 and position < len(candidates):
            place = candidates[position]
            runs[-1].has_kept |= bool(makes[runs[-1].last + 1 : place].any())
            runs[-1].last = place
        elif candidates:
            # For a module called several times: the call that read the same storages.
            reads = set(uses.storage_id[low[op_id] : low[op_id + 1]].tolist())
            same = [one for one in candidates if reads & set(uses.storage_id[low[one] : low[one + 1]].tolist())]
            place = (same or candidates)[-1]
            runs.append(_Run(place, place, op_id))
        else:
            continue
        before = counts[op_id]
    return runs


def _region(step: Step, run: _Run) -> tuple[int, int, int]:
    """Finds where a region ran in forward, as far as module calls show.

    Returns:
        The operator before which its inputs were created, its first operator, and its last.
    """
    module_ids = step.ops.module_id[run.first : run.last + 1]
    around = _common_module(step, np.unique(module_ids[module_ids != NONE]).tolist())
    calls = step.module_calls
    is_call = (calls.module_id == around) & ~calls.is_recompute & (calls.first_op_id != NONE)
    is_call &= (calls.first_op_id <= run.last) & (calls.last_op_id >= run.last)
    if around == NONE or not is_call.any():
        return run.first, run.first, run.last
    begin, end = int(calls.first_op_id[is_call].max()), int(calls.last_op_id[is_call].min())
    if begin < run.first:
        # Operators before the first recomputed one: their outputs are kept, or the region is only part of the call.
        return (begin, begin, end) if run.has_kept else (run.first, run.first, run.last)
    # Operators inserted by other policies at the edge of a call are outside of it.
    return run.first, begin, end


def _common_module(step: Step, module_ids: list[int]) -> int:
    """Returns the innermost module that contains all given ones, NONE if there is none."""
    chains = []
    for module in module_ids:
        chain = [module]
        while step.modules.parent_id[chain[-1]] != NONE:
            chain.append(int(step.modules.parent_id[chain[-1]]))
        chains.append(chain)
    shared = set(chains[0]).intersection(*chains[1:]) if chains else set()
    return next((module for module in chains[0] if module in shared), NONE) if chains else NONE
