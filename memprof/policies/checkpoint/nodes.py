"""Nodes of autograd's graph: the operators that each runs in backward, and what it or Python keeps until then."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from memprof.policies.rewrite.autocast_cache import cached_until
from memprof.trace.operator_facts import ACCUMULATES, CLONE, REDUCES_GRADIENT, RESHAPES, are_among
from memprof.trace.schema import NONE, Ints, Saved
from memprof.trace.step import Step


@dataclass(frozen=True, eq=False)
class Nodes:
    """Moments of the node of each forward operator, NONE where none ran; shape ``(ops,)``.

    Attributes:
        first: Its first operator: its saved tensors are unpacked right before it.
        returned: The last operator its function runs: unpacked tensors without other references are freed after it.
        released: The last operator before its saved tensors are released.
        last: Its last operator, sums of gradients included.
    """

    first: Ints
    returned: Ints
    released: Ints
    last: Ints


def find_nodes(step: Step) -> Nodes:
    """Finds the nodes' moments from the operators that ran in backward."""
    ops = step.ops
    rows = np.flatnonzero(ops.forward_op_id != NONE)
    owner = ops.forward_op_id[rows]
    first = np.full(len(ops), NONE, dtype=np.int64)
    last = first.copy()
    first[owner[::-1]] = rows[::-1]
    last[owner] = rows

    nodes = np.unique(owner)
    is_sum, is_reduction, is_reshape = (are_among(ops.name, each) for each in (ACCUMULATES, REDUCES_GRADIENT, RESHAPES))
    begin, end = first[nodes], last[nodes].copy()
    while True:
        step_back = is_sum[end] & (end > begin)
        if not step_back.any():
            break
        end -= step_back
    released = last.copy()
    released[nodes] = end
    end = end.copy()
    while True:
        pair = is_reshape[end] & (end - 1 > begin) & is_reduction[np.maximum(end - 1, 0)]
        single = is_reduction[end] & (end > begin)
        if not (pair | single).any():
            break
        end -= 2 * pair + (single & ~pair)
    returned = last.copy()
    returned[nodes] = end
    return Nodes(first, returned, released, last)


def python_death(step: Step, nodes: Nodes) -> Ints:
    """Returns the operator after which Python drops each storage, NONE where it never does; shape ``(storages,)``.

    A storage that outlives every node that saved it is last referenced by Python: it is freed as recorded. For one
    freed with such a node, Python dropped its reference earlier, and the recording does not contain when. It is then
    assumed to drop it after the last operator that uses the storage outside backward, or when the local variables that
    the source shows to hold it are gone (``held_op_id``), or, if it was passed to a module, when the module's call
    returns: its frames hold the arguments.
    """
    storages, saved = step.storages, step.saved
    freed = storages.freed_op_id
    released = np.full(len(storages), NONE, dtype=np.int64)
    np.maximum.at(released, saved.storage_id, nodes.last[saved.forward_op_id])
    is_hidden = (released != NONE) & (freed != NONE) & (freed <= released)
    death = freed.copy()
    death[is_hidden] = np.maximum(_last_held(step)[is_hidden], storages.created_op_id[is_hidden])
    death[is_hidden] = np.maximum(death, cached_until(step, is_hidden))[is_hidden]
    death[is_hidden] = np.maximum(death, storages.held_op_id)[is_hidden]
    return np.where(is_hidden, np.minimum(death, freed), death)


def _last_held(step: Step) -> Ints:
    """Returns the last operator at which a use proves that Python holds a storage, shape ``(storages,)``: no node's."""
    calls, uses = step.module_calls, step.uses
    call_of_op = np.full(len(step.ops), NONE, dtype=np.int64)
    for call in np.flatnonzero(~calls.is_recompute & (calls.first_op_id != NONE)):
        call_of_op[calls.first_op_id[call] : calls.last_op_id[call] + 1] = call

    # What the job's own checkpoint reads again, it holds in a variable until then.
    is_plain = (step.ops.forward_op_id[uses.op_id] == NONE) | step.ops.is_recompute[uses.op_id]
    op_ids, storage_ids = uses.op_id[is_plain], uses.storage_id[is_plain]
    created = step.storages.created_op_id[storage_ids]
    held = op_ids.copy()
    around = call_of_op[op_ids]
    # Outwards through the calls that received the storage from outside.
    while True:
        came_in = (
            (around != NONE) & (calls.first_op_id[around] > created) if len(calls) else np.zeros(0, dtype=np.bool_)
        )
        if not came_in.any():
            break
        held[came_in] = calls.last_op_id[around[came_in]]
        around = np.where(came_in, calls.parent_call_id[around], NONE)
    last = np.full(len(step.storages), NONE, dtype=np.int64)
    np.maximum.at(last, storage_ids, held)
    # An in-place operator whose backward needs what it overwrites clones that first, and holds the clone while it runs.
    clones = np.flatnonzero((step.ops.name[:-1] == CLONE) & step.ops.mutates[1:])
    is_clone = np.isin(step.storages.created_op_id, clones)
    last[is_clone] = np.maximum(last[is_clone], step.storages.created_op_id[is_clone] + 1)
    return last


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
    user = np.where((ops.name[makers] == CLONE) & ops.mutates[follower], follower, makers)
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
