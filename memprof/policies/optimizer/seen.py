"""Refuses recorded steps whose loop uses gradients in ways that the optimizer policy cannot keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.optimizer.recognise import GRADIENT, ZEROING, Updates
from memprof.policies.optimizer.refusals import (
    AVERAGED,
    DISTRIBUTED,
    EARLY,
    NEVER_RESET,
    SCALED,
    SECOND_BACKWARD,
    SETTINGS_CHANGED,
    USED,
    clipped,
    needs_whole,
    no_form,
)
from memprof.policies.optimizer.single_updates import SWAPS
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.usages import CHANGES_SETTINGS, NEEDS_CLOSURE, OptimizerTraits

if TYPE_CHECKING:
    from memprof.policies.optimizer.policy import OptimizerPolicy
    from memprof.trace.step import Step

#: In the stack of what a GradScaler and the functions that clip run.
_SCALER = "torch/amp/grad_scaler.py:"
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")


def refuse_optimizers(step: Step, policy: OptimizerPolicy) -> None:
    """Rejects optimizers that lack the update form, or that need all parameters at once.

    Raises:
        PolicyError: There is one.
    """
    for optimizer in step.optimizers:
        if policy.loop and not optimizer.has_form(policy.loop):
            raise PolicyError(no_form(optimizer.name, policy.loop))
        if policy.in_backward or policy.state == "host":
            refuse_closure(optimizer)


def refuse_closure(optimizer: OptimizerTraits) -> None:
    """Rejects an optimizer that cannot update one parameter at a time, because it needs a closure.

    Raises:
        PolicyError: It does.
    """
    if NEEDS_CLOSURE in optimizer.words:
        raise PolicyError(needs_whole(optimizer.name))


def refuse_loop(step: Step) -> None:
    """Rejects a loop that would be refused if updates ran inside backward, before its updates are read.

    Raises:
        PolicyError: It is.
    """
    if "DistributedDataParallel" in set(step.modules.type[np.unique(step.module_calls.module_id)]):
        raise PolicyError(DISTRIBUTED)
    if CHANGES_SETTINGS in step.usages:
        raise PolicyError(SETTINGS_CHANGED)
    if step.ops.micro_batch.max(initial=0) > 0:
        raise PolicyError(SECOND_BACKWARD)


def refuse_gradients(step: Step, updates: Updates) -> None:
    """Rejects a loop that uses gradients after backward, adds to them, or uses before the step what that changes.

    Raises:
        PolicyError: It does.
    """
    ops, uses = step.ops, step.uses
    gradients = np.array([u.storages[GRADIENT] for u in updates.updates if GRADIENT in u.storages], dtype=np.int64)
    # A second backward adds to an existing gradient: one from this step, or an older one set to zero.
    adds = (ops.phase == "backward") & (ops.forward_op_id == NONE) & (ops.name == "aten.add_.Tensor")
    rows = (uses.role == "mutate") & adds[uses.op_id]
    added = np.bincount(uses.storage_id[rows], minlength=len(step.storages))[gradients]
    is_new = step.storages.created_op_id[gradients] != NONE
    if np.any(added + is_new > 1):
        raise PolicyError(SECOND_BACKWARD)
    last = max((update.completed_by for update in updates.updates), default=NONE)
    is_between = np.isin(uses.storage_id, gradients) & (uses.op_id > last) & ~np.isin(uses.op_id, updates.ops)
    is_between &= ~np.isin(ops.name[uses.op_id], ZEROING)
    if is_between.any():
        raise PolicyError(_why_used(step, uses.op_id[is_between]))
    completed, ended = np.full(len(step.storages), len(ops)), np.full(len(step.storages), NONE)
    for update in [each for each in updates.updates if each.completed_by != NONE]:
        completed[[storage for key, storage in update.storages.items() if key != GRADIENT]] = update.completed_by
    is_own = np.isin(uses.op_id, updates.ops)
    np.maximum.at(ended, uses.storage_id[is_own], uses.op_id[is_own])
    is_early = (uses.op_id > completed[uses.storage_id]) & (uses.op_id < ended[uses.storage_id]) & ~is_own
    if np.any(is_early & (ops.phase[uses.op_id] != "backward") & ~np.isin(ops.name[uses.op_id], SWAPS)):
        raise PolicyError(EARLY)
    if np.any((added > 0) & ~is_new & ~_are_reset(step, gradients)):
        raise PolicyError(NEVER_RESET)


def _why_used(step: Step, ops: Ints) -> str:
    """Returns why gradients cannot be used by operators after backward."""
    stacks = {int(stack) for stack in step.ops.stack_id[ops] if stack != NONE}
    frames = [str(step.stacks.frames[stack]) for stack in stacks]
    if any(_SCALER in each for each in frames):
        return SCALED
    for function in _CLIPPING:
        if any(f":{function}" in each for each in frames):
            return clipped(function)
    return AVERAGED if step.ops.phase[ops[0]] == "backward" else USED


def _are_reset(step: Step, gradients: Ints) -> Bools:
    """Returns which gradients the loop itself changes outside backward and update, as zero_grad() does."""
    uses, phase = step.uses, step.ops.phase
    is_own = ~np.isin(phase[uses.op_id], ("backward", "optimizer")) & (uses.role != "read")
    is_own |= np.isin(step.ops.name[uses.op_id], ZEROING)
    reset: Bools = np.isin(gradients, uses.storage_id[is_own])
    return reset
