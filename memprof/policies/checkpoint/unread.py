"""What a node of autograd's graph keeps without an operator reading it, such as one it needs only the sizes of."""

from __future__ import annotations

import dataclasses

import numpy as np

from memprof.policies.checkpoint.nodes import Nodes
from memprof.trace.schema import NONE, Saved
from memprof.trace.step import Step


def with_unread(step: Step, nodes: Nodes) -> Step:
    """Returns the step with rows in ``saved`` for what a node kept that none of its operators reads.

    The trace infers saved tensors from their readers in backward. ``index_add`` keeps its source for the sizes: such a
    storage is freed with the node, and only the node can have referenced it, since Python does not run meanwhile.
    """
    ops, uses, storages = step.ops, step.uses, step.storages
    freed = storages.freed_op_id
    dies_with = np.where(freed != NONE, ops.forward_op_id[freed], NONE)
    is_kept = (dies_with != NONE) & (storages.created_op_id != NONE) & (storages.created_op_id <= dies_with)
    is_kept &= ~ops.is_recompute[freed] & (freed <= nodes.released[dies_with])
    kept = np.flatnonzero(is_kept)
    known = step.saved.forward_op_id * len(storages) + step.saved.storage_id
    kept = kept[~np.isin(dies_with[kept] * len(storages) + kept, known)]
    makers = dies_with[kept]
    # Where an in-place operator cloned what it overwrites, the clone takes its place.
    follower = np.minimum(makers + 1, len(ops) - 1)
    user = np.where((ops.name[makers] == "aten.clone.default") & ops.mutates[follower], follower, makers)
    is_user = np.zeros(len(ops), dtype=np.bool_)
    is_user[user] = True
    by_user = np.flatnonzero(is_user[uses.op_id])
    is_used = np.isin(user * len(storages) + kept, uses.op_id[by_user] * len(storages) + uses.storage_id[by_user])
    kept, makers = kept[is_used], makers[is_used]
    if not len(kept):
        return step
    saved = step.saved
    rows = Saved.of(
        storage_id=np.append(saved.storage_id, kept),
        forward_op_id=np.append(saved.forward_op_id, makers),
        module_id=np.append(saved.module_id, ops.module_id[makers]),
        released_op_id=np.append(saved.released_op_id, freed[kept]),
    )
    return dataclasses.replace(step, saved=rows.take(np.argsort(rows.forward_op_id, kind="stable")))
