"""Predicts a step whose saved tensors, optimizer state or parameters leave the device temporarily."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.rewrite.draft import Draft
from memprof.policies.rewrite.insertion import SWAP_IN, SWAP_OUT
from memprof.policies.swap.copies import copy_ops, copy_stalls_us, link_of
from memprof.policies.swap.predicted_moves import (
    parameters_to_move,
    state_to_move,
    transform_parameters,
    transform_state,
)
from memprof.policies.swap.records import Records, find_records
from memprof.replay.rounding import pinned_peak, rounded_when_pinned
from memprof.trace.schema import Ints
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.swap.policy import Swap


def transform(step: Step, policy: Swap, *, at_most: bool = False) -> Step:
    """Rewrites a step as the policy would change it.

    Args:
        step: The step.
        policy: What is moved, and where.
        at_most: Assume the maximum for what is not recorded: how long variables hold moved storages.

    Raises:
        PolicyError: A pattern matches nothing, or the step did not run on the device that the policy moves from.
    """
    if policy.to == "host" and not step.targets_device():
        raise PolicyError("swap cannot move to host: this step is already in host memory; write to = 'disk'.")
    if policy.to == "disk" and step.targets_device():
        raise PolicyError("swap can only move to disk from host memory, and this step is a GPU's; write to = 'host'.")
    if policy.what == "optimizer":
        return transform_state(step, policy)
    if policy.what == "parameters":
        return transform_parameters(step, policy)
    return _transform_activations(step, policy, at_most=at_most)


def _transform_activations(step: Step, policy: Swap, *, at_most: bool) -> Step:
    records = find_records(step, policy.modules, policy.minimum_bytes, with_variables=at_most)
    draft = Draft(step)
    let_go, gone, back = _moments(records, policy.prefetch)
    # Backward uses the original if it still exists.
    is_moved = gone < records.unpacked

    stalls_us = copy_stalls_us(step, records, let_go, back, is_moved, policy)
    draft.duration_us = step.duration_us + stalls_us
    link = link_of(step, policy)
    outs = copy_ops(step, records.packed, records.storage, records.forward_op, SWAP_OUT, link.out_bytes_per_us)
    out_ids = draft.insert_ops(outs, records.packed)
    draft.use(out_ids, records.storage, "read")

    # If packed and released at one moment, it is freed with its own copy out.
    last = np.where(gone < records.packed, out_ids, gone)
    # At one moment the required record comes first, then the prefetched ones, from the last packed on.
    order = np.lexsort((-np.arange(len(records)), back))
    order = order[is_moved[order]]
    moved, last, back = records.take(order), last[order], back[order]
    ins = copy_ops(step, back, moved.storage, moved.forward_op, SWAP_IN, link.in_bytes_per_us)
    draft.split_lives(moved.storage, last, draft.insert_ops(ins, back), moved.released)
    return draft.build()


def _moments(records: Records, distance: int) -> tuple[Ints, Ints, Ints]:
    """Returns when each original is released, the operator after which it is freed, and when its copy back begins."""
    let_go = _let_go(records, distance)
    # The original is freed once nothing holds it, including the copy out: if released at a moment, it is freed after
    # the operator before.
    gone = np.maximum(records.held, let_go - 1)
    if records.again is None:
        return let_go, gone, _back(records, gone, distance)
    # Storages copied back in forward are packed again: groups of their own, with which those next to them come back.
    is_moved = np.isin(records.again.storage, records.storage[gone < records.unpacked])
    both, is_own = records.merged(records.again.take(is_moved))
    let_go = _let_go(both, distance)
    gone = np.maximum(both.held, let_go - 1)
    return let_go[is_own], gone[is_own], _back(both, gone, distance)[is_own]


def _groups(records: Records) -> tuple[Ints, Ints]:
    """Numbers the groups packed by one node each, in order of packing.

    Returns:
        The group of each record, and the moment at which each group's packing begins.
    """
    _, first, code = np.unique(records.forward_op, return_index=True, return_inverse=True)
    place = np.empty(len(first), dtype=np.int64)
    place[np.argsort(first)] = np.arange(len(first))
    return place[code], records.packed[np.sort(first)]


def _let_go(records: Records, distance: int) -> Ints:
    """Returns the moment at which each original is released: a few nodes later, or when forward ends."""
    if distance == 0:
        return records.packed
    group, packed = _groups(records)
    later = np.append(packed[distance:], np.full(min(distance, len(packed)), np.iinfo(np.int64).max))
    let_go: Ints = np.minimum(records.flushed, later[group])
    return let_go


def _back(records: Records, gone: Ints, distance: int) -> Ints:
    """Returns the moment at which each copy back begins: when a storage packed by one of the next nodes is needed."""
    back = records.unpacked.copy()
    if distance == 0 or not len(records):
        return back
    group, packed = _groups(records)
    needed = np.full(len(packed), np.iinfo(np.int64).max)
    np.minimum.at(needed, group, records.unpacked)
    for ahead in range(min(distance, len(packed) - 1) + 1):
        then = np.append(needed[ahead:], np.full(ahead, np.iinfo(np.int64).max))[group]
        is_gone = gone < then
        back[is_gone] = np.minimum(back, then)[is_gone]
    return back


def host_bytes(step: Step, policy: Swap) -> int:
    """Returns the pinned bytes that a policy's copies take at most.

    Raises:
        PolicyError: The policy does not fit the step.
    """
    sizes = step.storages.requested_bytes
    if policy.what == "optimizer":
        return int(rounded_when_pinned(sizes[state_to_move(step, policy)], step.allocator_settings).sum())
    if policy.what == "parameters":
        return int(rounded_when_pinned(sizes[parameters_to_move(step, policy)[0]], step.allocator_settings).sum())
    records = find_records(step, policy.modules, policy.minimum_bytes)
    return pinned_peak(sizes[records.storage], records.packed, records.released, step.allocator_settings)
