"""How long Python references forward's storages: those not saved for backward are freed with the last reference."""

from __future__ import annotations

import numpy as np

from memprof.policies.checkpoint.nodes import Nodes
from memprof.policies.rewrite.autocast_cache import cached_until
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step


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
    clones = np.flatnonzero((step.ops.name[:-1] == "aten.clone.default") & step.ops.mutates[1:])
    is_clone = np.isin(step.storages.created_op_id, clones)
    last[is_clone] = np.maximum(last[is_clone], step.storages.created_op_id[is_clone] + 1)
    return last
