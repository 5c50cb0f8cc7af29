"""Predicts a step whose optimizer state is in memory only while it is used."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.optimizer.refusals import refuse_closure
from memprof.policies.optimizer.single_updates import CALL_US, single_updates, update_form
from memprof.policies.rewrite.draft import Draft
from memprof.policies.runtime.model_names import chosen_modules, with_children
from memprof.policies.swap.owned.stays import can_move, joined, update_of, with_stays
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.swap.policy import Swap

#: Source file of LBFGS updates, in the stacks of its operators.
HISTORY = "torch/optim/lbfgs.py"
NO_HISTORY = (
    "swap cannot move LBFGS' state: it is a history of gradients in lists, in use while the closure runs. Lower its "
    "history_size, or do not swap the optimizer."
)


def transform_state(step: Step, policy: Swap) -> Step:
    """Keeps optimizer state in memory during its update only.

    Raises:
        PolicyError: The step has no update, or no state of that size.
    """
    moved = state_to_move(step, policy)
    if policy.one_by_one:
        return _one_by_one(step, policy, moved)
    return _with_reads(step, policy, moved, moved, *update_of(step, moved))


def state_to_move(step: Step, policy: Swap) -> Ints:
    """Returns the storages of optimizer state that the policy moves.

    Raises:
        PolicyError: There is no state of that size, or it is in use while a closure runs.
    """
    updates = np.unique(step.ops.stack_id[(step.ops.phase == "optimizer") & (step.ops.stack_id != NONE)])
    if any(HISTORY in str(frames) for frames in step.stacks.frames[updates]):
        raise PolicyError(NO_HISTORY)
    is_movable = can_move(step, policy, "optimizer_state")
    if not policy.is_whole:
        owner = step.storages.module_id
        is_movable &= (owner != NONE) & with_children(step, chosen_modules(step, policy.modules))[owner]
    moved = np.flatnonzero(is_movable)
    if not len(moved):
        where = "" if policy.is_whole else " of the chosen modules"
        raise PolicyError(
            f"The step has no optimizer state{where} of {policy.minimum_bytes:,} bytes or more; swap has no effect."
        )
    return moved


def _one_by_one(step: Step, policy: Swap, moved: Ints) -> Step:
    """Keeps the state of each parameter in memory during its own update only.

    Raises:
        PolicyError: The optimizer does not update one parameter after another.
    """
    for optimizer in step.optimizers:
        refuse_closure(optimizer)
    form = update_form(step)
    if form != "loop":
        raise PolicyError(
            f"To move state one parameter at a time, swap needs an optimizer that loops over its parameters; this one "
            f"runs its {form} form. Create it with foreach=False and record again, or leave one_by_one out; on "
            "a GPU, write optimizer host."
        )
    updates = single_updates(step)
    at = moved[updates.of_storage[moved] != NONE]  # the rest stays out: a parameter without a gradient
    own, first, last = updates.of_storage[at], updates.first, updates.last
    freed = _freed_with_calls(step, updates.ops, first, last)
    rewritten = _with_reads(freed, policy, moved, at, first[own], last[own])
    return dataclasses.replace(rewritten, duration_us=rewritten.duration_us + CALL_US * (len(first) - 1))


def _with_reads(step: Step, policy: Swap, moved: Ints, at: Ints, first: Ints, last: Ints) -> Step:
    """Keeps state in memory during its update and while the job reads it.

    What is read between updates stays until a module is called, or until its update ends.

    Args:
        step: The step.
        policy: The settings.
        moved: The storages that are moved.
        at: Those that are updated.
        first: The first operator of each one's update.
        last: The last one.
    """
    begin, end = np.full((2, len(step.storages)), len(step.ops))
    begin[at], end[at] = first, last
    storage, op = step.uses.storage_id, step.uses.op_id
    is_read = np.isin(storage, moved) & ((op < begin[storage]) | (op > end[storage]))
    storage, op = storage[is_read], op[is_read]
    calls = np.unique(step.module_calls.first_op_id[step.module_calls.first_op_id != NONE])
    leaves = np.append(calls, len(step.ops))[np.searchsorted(calls, op, side="right")] - 1
    leaves = np.where(op < begin[storage], np.minimum(leaves, end[storage]), leaves)
    at, first, last = joined((at, first, last), (storage, op, leaves))
    return with_stays(step, policy, at, first, last, np.ones(len(at), dtype=np.bool_), moved=moved)


def _freed_with_calls(step: Step, ops: Ints, first: Ints, last: Ints) -> Step:
    """Frees what a loop's variables hold until the next parameter with the call for its own parameter."""
    order = np.argsort(first)
    storages = step.storages
    is_own = np.append(np.isin(np.arange(len(step.ops)), ops), False)
    created, freed = storages.created_op_id, storages.freed_op_id
    block = np.maximum(np.searchsorted(first[order], created, side="right") - 1, 0)
    end = last[order][block]
    is_held = is_own[created] & ((freed == NONE) | (freed > end)) & (storages.category != "optimizer_state")
    is_held &= is_own[np.where(freed == NONE, created, freed)]
    draft = Draft(step)
    draft.storages = draft.storages.replace(freed_op_id=np.where(is_held, end, freed))
    return draft.build()
