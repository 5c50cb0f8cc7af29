"""How long Python holds the storages of forward: what nobody saves for backward dies when Python lets go of it."""

from __future__ import annotations

import numpy as np

from memprof.policies.checkpoint.nodes import Nodes
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step


def python_death(step: Step, nodes: Nodes) -> Ints:
    """Returns after which operator Python holds each storage no longer, NONE where to the end; shape ``(storages,)``.

    A storage that outlives every node that saved it is held by Python alone in the end: it dies as recorded. One that
    dies with such a node was let go of by Python earlier, and the recording does not say when. It is then taken to die
    after the last operator that uses it outside backward, or, where it was handed to a module, when the module's call
    returns: the frames of the call hold its arguments. (A local variable that keeps it longer is not seen.)
    """
    storages, saved = step.storages, step.saved
    freed = storages.freed_op_id
    released = np.full(len(storages), NONE, dtype=np.int64)
    np.maximum.at(released, saved.storage_id, nodes.last[saved.forward_op_id])
    is_hidden = (released != NONE) & (freed != NONE) & (freed <= released)
    death = freed.copy()
    death[is_hidden] = np.maximum(_last_held(step)[is_hidden], storages.created_op_id[is_hidden])
    casts = parameter_casts(step)
    death[casts & is_hidden] = np.maximum(death, _autocast_end(step, casts & ~is_hidden))[casts & is_hidden]
    return np.where(is_hidden, np.minimum(death, freed), death)


def parameter_casts(step: Step) -> Bools:
    """Marks the storages that hold a parameter in another type, made in forward, shape ``(storages,)``.

    Under autocast they are in its cache, which lives as long as the outermost autocast context.
    """
    uses = step.uses
    reads_parameter = np.zeros(len(step.ops), dtype=np.bool_)
    is_read = (uses.role == "read") & (step.storages.category[uses.storage_id] == "parameter")
    reads_parameter[uses.op_id[is_read]] = True
    is_cast = (step.ops.name == "aten._to_copy.default") & (step.ops.phase == "forward") & reads_parameter
    created = step.storages.created_op_id
    casts: Bools = (created != NONE) & is_cast[created]
    return casts


def _autocast_end(step: Step, seen: Bools) -> Ints:
    """Returns when autocast's cache is cleared that a storage made by an operator is in, shape ``(storages,)``.

    Casts that nobody saves, such as those of biases, show it; else it is the end of the outermost module's call.
    """
    calls = step.module_calls
    created, freed = step.storages.created_op_id, step.storages.freed_op_id
    end = np.full(len(created), NONE, dtype=np.int64)
    for call in np.flatnonzero((calls.parent_call_id == NONE) & ~calls.is_recompute & (calls.first_op_id != NONE)):
        is_inside = (created >= calls.first_op_id[call]) & (created <= calls.last_op_id[call])
        shown = freed[is_inside & seen & (freed != NONE)]
        end[is_inside] = shown.max() if len(shown) else calls.last_op_id[call]
    return end


def _last_held(step: Step) -> Ints:
    """Returns the last moment a use outside backward proves a storage held, shape ``(storages,)``."""
    calls, uses = step.module_calls, step.uses
    call_of_op = np.full(len(step.ops), NONE, dtype=np.int64)
    for call in np.flatnonzero(~calls.is_recompute & (calls.first_op_id != NONE)):
        call_of_op[calls.first_op_id[call] : calls.last_op_id[call] + 1] = call

    is_plain = step.ops.forward_op_id[uses.op_id] == NONE
    op_ids, storage_ids = uses.op_id[is_plain], uses.storage_id[is_plain]
    created = step.storages.created_op_id[storage_ids]
    held = op_ids.copy()
    around = call_of_op[op_ids]
    # Outwards through the calls that the storage came into from outside.
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
    # An operator in place whose backward needs what it overwrites clones that first, and holds the clone while it runs.
    clones = np.flatnonzero((step.ops.name[:-1] == "aten.clone.default") & step.ops.mutates[1:])
    is_clone = np.isin(step.storages.created_op_id, clones)
    last[is_clone] = np.maximum(last[is_clone], step.storages.created_op_id[is_clone] + 1)
    return last
