"""Frees gradients where an update inside backward has used them."""

from __future__ import annotations

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.optimizer.refusals import SECOND_BACKWARD, USED
from memprof.policies.optimizer.single_updates import is_updating
from memprof.policies.rewrite.draft import Draft
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step


def free_gradients(draft: Draft, step: Step, workspace: Ints, numbers: float) -> None:
    """Frees each gradient with the backward operator that completes it, and drops those of earlier steps.

    Args:
        draft: The draft of the step; its storages and uses are replaced.
        step: The step.
        workspace: Bytes of the operators' workspaces; those of the updates are added, shape ``(ops,)``.
        numbers: How many numbers an update makes for each one of a gradient.

    Raises:
        PolicyError: Gradients are accumulated, or used between backward and update, as where they are clipped.
    """
    if step.ops.micro_batch.max(initial=0) > 0:
        raise PolicyError(SECOND_BACKWARD)
    is_update, storages, op, storage = is_updating(step), step.storages, step.uses.op_id, step.uses.storage_id
    used = np.full(len(storages), NONE, dtype=np.int64)
    np.maximum.at(used, storage[is_update[op]], op[is_update[op]])
    is_gradient = storages.category == "gradient"
    is_before = is_gradient[storage] & (op < used[storage])
    makes = is_before & (step.ops.phase[op] == "backward")
    begun, done = np.full(len(storages), len(is_update)), np.full(len(storages), NONE)
    np.minimum.at(begun, storage[makes], op[makes])
    np.maximum.at(done, storage[makes], op[makes])
    is_freed = done != NONE
    if np.any(is_before & is_freed[storage] & (op > done[storage]) & ~is_update[op]):
        raise PolicyError(USED)
    created = np.where(is_freed & (storages.created_op_id == NONE), begun, storages.created_op_id)
    np.add.at(workspace, done[is_freed], (numbers * storages.allocated_bytes[is_freed]).astype(np.int64))
    draft.uses = draft.uses.take(~is_freed[storage] | ((op >= created[storage]) & (op <= done[storage])))
    draft.unsave(np.flatnonzero(is_freed))
    draft.storages = storages.replace(
        created_op_id=created, freed_op_id=np.where(is_freed, done, storages.freed_op_id)
    )
    draft.remove_storages(np.flatnonzero(is_gradient & ~is_freed & (storages.created_op_id == NONE)))
