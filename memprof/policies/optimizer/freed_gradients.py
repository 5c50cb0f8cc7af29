"""Frees gradients where an update inside backward has used them."""

from __future__ import annotations

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.optimizer.refusals import EARLY, SECOND_BACKWARD, USED
from memprof.policies.optimizer.single_updates import SWAPS, is_updating, parameters_of
from memprof.policies.rewrite.draft import Draft
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step


def free_gradients(draft: Draft, step: Step, workspace: Ints, numbers: float) -> None:
    """Frees each gradient with the backward operator that completes it, and drops those of earlier steps.

    Args:
        draft: The draft of the step; its storages and uses are replaced.
        step: The step.
        workspace: Bytes of the operators' workspaces, to which those of the updates are added; shape ``(ops,)``.
        numbers: How many numbers an update makes for each one of a gradient.

    Raises:
        PolicyError: Gradients are accumulated, or what an update uses or changes is used before the optimizer's step.
    """
    ops, storages, op, storage = step.ops, step.storages, step.uses.op_id, step.uses.storage_id
    if ops.micro_batch.max(initial=0) > 0:
        raise PolicyError(SECOND_BACKWARD)
    is_update, is_gradient = is_updating(step), storages.category == "gradient"
    used, done = np.full((2, len(storages)), NONE)
    np.maximum.at(used, storage[is_update[op]], op[is_update[op]])
    is_before = op < used[storage]
    makes = is_gradient[storage] & is_before & (ops.phase[op] == "backward")
    begun = np.full(len(storages), len(ops))
    np.minimum.at(begun, storage[makes], op[makes])
    np.maximum.at(done, storage[makes], op[makes])
    is_freed = done != NONE

    owner = parameters_of(step)
    updated = np.full(len(storages), len(ops))  # when the parameter of each gradient and state is updated, and itself
    known = is_freed & (owner != NONE)
    updated[owner[known]] = done[known]
    is_other = ~is_update[op] & (ops.phase[op] != "backward") & ~np.isin(ops.name[op], SWAPS)
    early = storage[is_before & is_other & (owner[storage] != NONE) & (op > updated[owner[storage]])]
    if len(early):
        raise PolicyError(USED if is_gradient[early].any() else EARLY)

    np.add.at(workspace, done[is_freed], (numbers * storages.allocated_bytes[is_freed]).astype(np.int64))
    created = np.where(is_freed & (storages.created_op_id == NONE), begun, storages.created_op_id)
    draft.uses = draft.uses.take(~is_freed[storage] | ((op >= created[storage]) & (op <= done[storage])))
    draft.unsave(np.flatnonzero(is_freed))
    draft.storages = storages.replace(created_op_id=created, freed_op_id=np.where(is_freed, done, storages.freed_op_id))
    draft.remove_storages(np.flatnonzero(is_gradient & ~is_freed & (storages.created_op_id == NONE)))
