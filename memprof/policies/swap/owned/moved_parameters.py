"""Predicts a step whose parameters are in memory only while they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.rewrite.enclosing_calls import Calls
from memprof.policies.rewrite.stack_marks import is_in_transform
from memprof.policies.swap.owned.stays import can_move, joined, update_of, with_stays
from memprof.policies.swap.records import called_modules, node_bounds, require_untouched
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.swap.policy import Swap


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
            f"No unshared parameter of the chosen modules has {policy.minimum_bytes:,} bytes or more and is used "
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
