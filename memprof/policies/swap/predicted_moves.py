"""Predicts a step whose optimizer state or parameters are in memory only while they are used."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.optimizer.policy import refuse_closure
from memprof.policies.optimizer.single_updates import CALL_US, single_updates, update_form
from memprof.policies.rewrite.draft import Draft
from memprof.policies.rewrite.stack_marks import Calls, is_in_transform
from memprof.policies.runtime.model_names import chosen_modules, with_children
from memprof.policies.swap.copies import can_move, joined, update_of, with_stays
from memprof.policies.swap.records import called_modules, node_bounds, require_untouched
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
            f"the step has no optimizer state{where} of {policy.minimum_bytes:,} bytes or more; swap has no effect."
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
            f"to move state one parameter at a time, swap needs an optimizer that loops over its parameters; this one "
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


def transform_parameters(step: Step, policy: Swap) -> Step:
    """Keeps parameters in memory during their modules' forward, their nodes' backward, and the update only.

    Raises:
        PolicyError: A pattern matches nothing, or no parameter can be moved.
    """
    moved, top_of = parameters_to_move(step, policy)
    calls, tops = step.module_calls, _outermost_modules(step, policy)
    at, starts, ends, is_new = [moved], *([column] for column in update_of(step, moved)), [np.ones(len(moved), bool)]
    is_call = ~calls.is_recompute & (calls.first_op_id != NONE)
    for call in np.flatnonzero(is_call & (tops[calls.module_id] == calls.module_id)):
        own = moved[top_of[moved] == calls.module_id[call]]
        at.append(own)
        starts.append(np.full(len(own), calls.first_op_id[call]))
        ends.append(np.full(len(own), calls.last_op_id[call]))
        is_new.append(np.zeros(len(own), dtype=np.bool_))
    leased, start, end = joined(_leases(step, top_of), _recomputed(step, top_of))
    columns = (
        np.concatenate([*at, leased]),
        np.concatenate([*starts, start]),
        np.concatenate([*ends, end]),
        np.concatenate([*is_new, np.zeros(len(leased), dtype=np.bool_)]),
    )
    return with_stays(step, policy, *columns)


def parameters_to_move(step: Step, policy: Swap) -> tuple[Ints, Ints]:
    """Returns the parameters that the policy moves, and the chosen module of each storage, NONE if it stays.

    Raises:
        PolicyError: A pattern matches nothing, or no parameter can be moved.
    """
    storages = step.storages
    tops = _outermost_modules(step, policy)
    require_untouched(step, tops != NONE)
    is_parameter = can_move(step, policy, "parameter") & (storages.module_id != NONE)
    top_of = np.where(is_parameter, tops[storages.module_id], NONE)
    top_of[_used_elsewhere(step, top_of, tops)] = NONE
    moved = np.flatnonzero(top_of != NONE)
    if not len(moved):
        raise PolicyError(
            f"no unshared parameter of the chosen modules has {policy.minimum_bytes:,} bytes or more and is used "
            "outside of torch.func; choose other modules or a smaller minimum_bytes."
        )
    return moved, top_of


def _outermost_modules(step: Step, policy: Swap) -> Ints:
    """Returns the outermost chosen module around each called module, NONE if there is none."""
    modules = step.modules
    is_chosen = called_modules(step, policy.modules)
    tops = np.full(len(modules), NONE, dtype=np.int64)
    for row in range(len(modules)):  # parents precede their children
        parent = int(modules.parent_id[row])
        if parent != NONE and tops[parent] != NONE:
            tops[row] = tops[parent]
        elif is_chosen[row]:
            tops[row] = row
    return tops


def _used_elsewhere(step: Step, top_of: Ints, tops: Ints) -> Ints:
    """Returns parameters that cannot be moved.

    Forward uses them outside their chosen module, because other modules share them, or they are used in a transform of
    torch.func, after which they stay.
    """
    calls = Calls(step, tops == np.arange(len(tops)))
    region = calls.region_of[step.uses.op_id]
    top = np.where(region != NONE, step.module_calls.module_id[region], NONE)
    is_forward = step.ops.phase[step.uses.op_id] == "forward"
    storage = step.uses.storage_id
    is_elsewhere = (is_forward & (top != top_of[storage])) | is_in_transform(step)[step.uses.op_id]
    return np.unique(storage[is_elsewhere & (top_of[storage] != NONE)])


def _leases(step: Step, top_of: Ints) -> tuple[Ints, Ints, Ints]:
    """Returns the parameters that backward reads, with the first use and the last release of each by its nodes."""
    ops, saved = step.ops, step.saved
    is_node = (ops.forward_op_id != NONE) & ~ops.is_recompute & (ops.phase == "backward")
    first, last = node_bounds(ops.forward_op_id, is_node)
    is_own = (top_of[saved.storage_id] != NONE) & (first[saved.forward_op_id] != NONE)
    storage, forward = saved.storage_id[is_own], saved.forward_op_id[is_own]
    start = np.full(len(top_of), len(ops), dtype=np.int64)
    end = np.full(len(top_of), NONE, dtype=np.int64)
    np.minimum.at(start, storage, first[forward])
    np.maximum.at(end, storage, last[forward])
    leased = np.unique(storage)
    return leased, start[leased], end[leased]


def _recomputed(step: Step, top_of: Ints) -> tuple[Ints, Ints, Ints]:
    """Returns the parameters that a recompute reads, with its first use of their module and the last of their nodes.

    A recompute saves tensors that hold the memory themselves until backward has read them.
    """
    ops, uses, total = step.ops, step.uses, len(step.ops)
    is_again = ops.is_recompute & (ops.phase == "backward")
    run = np.cumsum(is_again & ~np.append(False, is_again[:-1]))
    is_own = (top_of[uses.storage_id] != NONE) & (ops.phase[uses.op_id] == "backward")
    storage, op = uses.storage_id[is_own], uses.op_id[is_own]
    in_run = is_again[op]
    # All parameters of a chosen module come in when it is called, and those not saved leave when it returns.
    module = top_of[storage] * (total + 1) + run[op]
    modules, group = np.unique(module[in_run], return_inverse=True)
    first, last = np.full(len(modules), total), np.full(len(modules), NONE)
    np.minimum.at(first, group, op[in_run])
    np.maximum.at(last, group, op[in_run])
    _, row = np.unique(storage[in_run] * (total + 1) + run[op[in_run]], return_index=True)
    at, start, end = storage[in_run][row], first[group[row]], last[group[row]]
    # Nodes read what the last run before them has saved; rows are in the order of storages and of runs.
    node_storage, node_op = storage[~in_run], op[~in_run]
    keys = at * (total + 1) + start
    place = np.searchsorted(keys, node_storage * (total + 1) + node_op, side="right") - 1
    is_known = (place >= 0) & (at[np.maximum(place, 0)] == node_storage) if len(at) else np.zeros(len(place), np.bool_)
    forward = ops.forward_op_id[node_op]
    _, node_last = node_bounds(ops.forward_op_id, (ops.forward_op_id != NONE) & ~is_again & (ops.phase == "backward"))
    ended = np.where(forward != NONE, node_last[forward], node_op)
    np.maximum.at(end, place[is_known], ended[is_known])
    return at, start, end
