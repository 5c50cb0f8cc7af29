"""Refuses recorded steps whose loop uses gradients in ways that micro-batches would change."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.accumulate.refusals import (
    BY_HAND,
    CHANGED,
    DROPPED,
    HOOKS,
    IN_EVALUATION,
    LBFGS,
    NOT_A_MEAN,
    WEIGHED,
    left_whole,
)
from memprof.policies.rewrite.autocast_cache import parameter_casts
from memprof.policies.rewrite.batch_state import differentiated_gradients
from memprof.trace.schema import NONE, is_beside
from memprof.trace.usages import GRADIENT_HOOKS, IS_LBFGS, TRAINED_IN_EVALUATION

if TYPE_CHECKING:
    from memprof.policies.accumulate.policy import Accumulate
    from memprof.trace.step import Step

#: Stack functions of operators that are deferred to the last micro-batch.
HELD = ("torch/optim/", "torch/amp/grad_scaler.py", ":_clip_grads_with_norm_", ":clip_grad_value_")
#: In the stack of operators that backward runs itself, also after its last node, as DistributedDataParallel's copies.
_BACKWARD = ":_engine_run_backward"
#: In the stack of every operator that a DataLoader runs.
DATA_LOADER = "torch/utils/data/dataloader.py:"

#: In the stack of what begins a backward whose gradients are returned, not accumulated.
_RETURNED = re.compile(r"torch/autograd/__init__\.py:[0-9]+:grad\b|torch/_functorch/")


def refuse_loop(step: Step, policy: Accumulate) -> None:
    """Rejects a loop that a run under accumulate would refuse.

    Raises:
        PolicyError: It would.
    """
    if any(IS_LBFGS in optimizer.words for optimizer in step.optimizers):
        raise PolicyError(LBFGS)
    if GRADIENT_HOOKS in step.usages:
        raise PolicyError(HOOKS)
    if _differentiates_gradients(step):
        raise PolicyError(NOT_A_MEAN)
    if TRAINED_IN_EVALUATION in step.usages and reads_loader(step):
        raise PolicyError(left_whole(f"its batches are not split, as {IN_EVALUATION}", policy.micro_batches))
    if _sets_gradients(step):
        raise PolicyError(BY_HAND)
    if _drops_gradients(step):
        raise PolicyError(DROPPED)
    if _weighs_by_gradients(step):
        raise PolicyError(WEIGHED)


def refuse_changes(step: Step, last_backward: int) -> None:
    """Rejects a loop that changes gradients between backward and update: micro-batches add up what backward leaves.

    Raises:
        PolicyError: It does.
    """
    ops, uses = step.ops, step.uses
    first_update = int(np.flatnonzero(ops.phase == "optimizer")[0])
    allowed = (*HELD, _BACKWARD)
    is_allowed = [any(place in text for place in allowed) for text in step.stacks.frames]
    is_of_loop = ~np.array([*is_allowed, False], dtype=np.bool_)[ops.stack_id]
    rows = np.arange(len(ops))
    between = is_beside(ops.phase) & (rows > last_backward) & (rows < first_update) & is_of_loop
    is_gradient = (step.storages.category == "gradient")[uses.storage_id]
    if np.any(between[uses.op_id] & is_gradient & np.isin(uses.role, ("write", "mutate"))):
        raise PolicyError(CHANGED)


def reads_loader(step: Step) -> bool:
    """Returns whether a DataLoader yields the batches of the job."""
    return runs_in(step, DATA_LOADER)


def runs_in(step: Step, place: str) -> bool:
    """Returns whether operators ran below a place: part of a file's path, as stacks have it."""
    return any(place in str(frames) for frames in step.stacks.frames)


def _differentiates_gradients(step: Step) -> bool:
    """Returns whether backward runs through gradients of parameters, not only through gradients of inputs.

    The gradient of a parameter has its shape, or that transposed, and is made without reading the parameter; that of
    an input is made from it.
    """
    ops, uses, storages = step.ops, step.uses, step.storages
    of_gradient = differentiated_gradients(step)
    if not len(of_gradient):
        return False
    holds_parameter = (storages.category == "parameter") | parameter_casts(step)
    is_parameter = holds_parameter[uses.storage_id] & (uses.role == "read")
    shapes = storages.shape.astype(str)
    for op in of_gradient.tolist():
        makes = (uses.op_id == op) & (uses.role == "write")
        first = ops.forward_op_id[op]
        read = set(uses.storage_id[is_parameter & (uses.op_id == first)].tolist())
        if first == NONE or not read or not makes.any():
            continue
        itself = set(uses.storage_id[is_parameter & (uses.op_id == op)].tolist())
        wanted = {shape for one in read - itself for shape in (shapes[one], "x".join(shapes[one].split("x")[::-1]))}
        if wanted & set(shapes[uses.storage_id[makes]]):
            return True
    return False


def _sets_gradients(step: Step) -> bool:
    """Returns whether the loop sets gradients that torch.autograd.grad or torch.func has returned: none accumulate."""
    ops = step.ops
    if np.any((ops.phase == "backward") & (ops.forward_op_id == NONE)):
        return False
    stacks = np.unique(ops.stack_id[ops.stack_id != NONE])
    return any(_RETURNED.search(str(step.stacks.frames[stack])) for stack in stacks)


def _drops_gradients(step: Step) -> bool:
    """Returns whether backward leaves gradients of parameters after their update, as a generator's through its critic.

    These are in the way of the next backward: the loop resets them, and no update uses them.
    """
    ops, uses = step.ops, step.uses
    rows = np.flatnonzero((step.storages.category == "gradient")[uses.storage_id])
    phase = ops.phase[uses.op_id[rows]]
    is_update = phase == "optimizer"
    last = np.full(len(step.storages), NONE, dtype=np.int64)
    np.maximum.at(last, uses.storage_id[rows[is_update]], uses.op_id[rows[is_update]])
    updated = np.where(last == NONE, len(ops), last)
    is_made = (phase == "backward") & (uses.role[rows] != "read")
    return bool(np.any(is_made & (uses.op_id[rows] > updated[uses.storage_id[rows]])))


def _weighs_by_gradients(step: Step) -> bool:
    """Returns whether a loss depends on gradients of parameters that torch.autograd.grad returned, as a number.

    VQGAN weighs its adversarial loss so that both losses change the last layer alike. Gradients of inputs have the
    batch size among their sizes.
    """
    ops, uses, storages = step.ops, step.uses, step.storages
    backward = np.flatnonzero(ops.phase == "backward")
    if not len(backward):
        return False
    is_returned = np.append(ops.phase == "backward", False)[storages.created_op_id]  # NONE indexes the last entry
    shapes = storages.shape.astype(str)
    is_returned &= np.isin(shapes, np.unique(shapes[storages.category == "parameter"])) & (shapes != "")
    is_returned &= storages.category != "gradient"
    reads = (uses.role == "read") & is_returned[uses.storage_id] & (uses.op_id < backward[-1])
    return bool(np.any(reads & (ops.phase[uses.op_id] != "backward") & (ops.phase[uses.op_id] != "optimizer")))
