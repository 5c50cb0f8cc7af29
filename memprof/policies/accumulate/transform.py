"""Estimates a step under accumulation: one micro-batch, with the gradients of those before it, and time for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.accumulate.batch import find_batch, part_sizes
from memprof.policies.accumulate.policy import HOOKS, LBFGS
from memprof.policies.accumulate.scale import scale_step
from memprof.policies.rewrite.draft import Draft
from memprof.trace.schema import NONE
from memprof.trace.step import Step
from memprof.trace.usages import GRADIENT_HOOKS, IS_LBFGS

if TYPE_CHECKING:
    from memprof.policies.accumulate.policy import Accumulate


def transform(step: Step, policy: Accumulate) -> Step:
    """Returns the largest micro-batch, in which the gradients are alive from the start.

    While backward makes a gradient again, to add it, it takes its size once more. A dry run under the policy has the
    micro-batches themselves.

    Raises:
        PolicyError: The step trains nothing, its batch cannot be determined, or a run would refuse its loop.
    """
    phase, storages = step.ops.phase, step.storages
    backward, updates = np.flatnonzero(phase == "backward"), np.flatnonzero(phase == "optimizer")
    if not len(backward) or not len(updates):
        raise PolicyError("accumulate needs a step with a backward and an update by an optimizer; record one.")
    if any(IS_LBFGS in optimizer.words for optimizer in step.optimizers):
        raise PolicyError(LBFGS)
    if GRADIENT_HOOKS in step.usages:
        raise PolicyError(HOOKS)
    batch = find_batch(step)
    parts = part_sizes(batch.size, policy.micro_batches)
    repeats = np.isin(phase, ("forward", "backward"))
    scaled = scale_step(step, batch, int(parts[0]), repeats)
    draft = Draft(step)
    draft.ops, draft.storages = scaled.ops(len(parts)), scaled.storages()
    draft.duration_us = scaled.duration_us(draft.ops, len(parts))

    created = storages.created_op_id
    is_gradient = storages.category == "gradient"
    made = np.flatnonzero(is_gradient & (created != NONE) & repeats[created])
    again = draft.copy_storages(made, created[made], created[made])
    draft.redirect_uses(made, again, created[made], created[made])
    category, created = draft.storages.category.copy(), draft.storages.created_op_id.copy()
    category[again], created[made] = "temporary", NONE
    draft.storages = draft.storages.replace(category=category, created_op_id=created)
    # Those of the step before, which this one frees, are gone by its second micro-batch.
    is_older = is_gradient & (storages.created_op_id == NONE) & (storages.freed_op_id != NONE)
    draft.remove_storages(np.flatnonzero(is_older & (storages.freed_op_id < backward[-1])) if len(made) else made)
    return draft.build()
