"""Casts the outputs of the root module: the loss reads float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.trace.schema import NONE, Bools, Ints

if TYPE_CHECKING:
    from memprof.policies.precision.casts import Casts
    from memprof.trace.step import Step

#: In the stack of what a cache of transformers makes: an object that a plan does not look into for tensors to cast.
_CACHES = "transformers/cache_utils.py:"


def cast_outputs(casts: Casts) -> None:
    """Casts short outputs of the root module to float32: those read outside it, and those only held there."""
    step, types, nodes = casts.step, casts.types, casts.nodes
    uses, storages, saved = step.uses, step.storages, step.saved
    created = storages.created_op_id
    made_in = np.where(created != NONE, types.region[created], NONE)
    is_out = types.is_short & (made_in != NONE)
    # The loss and its backward: no operator of the region itself.
    is_outside_read = is_out[uses.storage_id] & (types.region[types.origin[uses.op_id]] == NONE)
    is_outside_read &= uses.op_id > types.region_end[np.maximum(made_in[uses.storage_id], 0)]
    rows = np.flatnonzero(is_outside_read)
    read, cast_of = np.unique(uses.storage_id[rows], return_inverse=True)
    sources = np.union1d(read, _held(casts, is_out, made_in))
    if not len(sources):
        return
    ends = types.region_end[made_in[sources]]
    freed = storages.freed_op_id[sources]
    ops, made = casts.insert(
        sources, ends + 1, ends, to_short=np.zeros(len(sources), dtype=np.bool_), freed=freed, category="activation"
    )
    last = _keep_until_returned(casts, ends, ops)
    # Outputs that the caller's variable holds until the next call has returned: until its casts, too.
    until_next = (freed != NONE) & (last[freed] != NONE)
    casts.draft.free(made[until_next], last[freed[until_next]])
    # NONE as an end of life means "outlives the step" here, not "freed at once".
    casts.draft.free(made[freed == NONE], NONE)
    casts.redirect(rows, made[np.searchsorted(sources, read)][cast_of])
    outside = types.region[types.origin[saved.forward_op_id]] == NONE
    place = np.minimum(np.searchsorted(sources, saved.storage_id), len(sources) - 1)
    is_moved = outside & (sources[place] == saved.storage_id)
    changed = casts.draft.saved.storage_id.copy()
    changed[is_moved] = made[place[is_moved]]
    casts.draft.saved = casts.draft.saved.replace(storage_id=changed)
    # The short tensor is only kept as long as the model itself saved it.
    kept = np.full(len(storages), NONE, dtype=np.int64)
    left = ~is_moved & (saved.released_op_id != NONE)
    np.maximum.at(kept, saved.storage_id[left], nodes.end[saved.released_op_id[left]])
    is_left = np.ones(len(uses), dtype=np.bool_)
    is_left[rows] = False
    is_left &= uses.op_id > types.region_end[np.maximum(made_in[uses.storage_id], 0)]
    np.maximum.at(kept, uses.storage_id[is_left], nodes.end[uses.op_id[is_left]])
    casts.free(sources, np.where(kept[sources] == NONE, ops, kept[sources]))


def _keep_until_returned(casts: Casts, ends: Ints, ops: Ints) -> Ints:
    """Makes a call of the root module end with the casts of its outputs.

    What was made before the call and freed at its end, such as the outputs of the step before in the caller's variable,
    is kept until then.

    Args:
        casts: The step being rewritten.
        ends: The last operator of the call that each cast follows.
        ops: The casts.

    Returns:
        The last cast after each operator that ends a call, NONE after others, of shape ``(ops,)``.
    """
    storages, region = casts.step.storages, casts.types.region
    last = np.full(len(casts.step.ops), NONE, dtype=np.int64)
    np.maximum.at(last, ends, ops)
    is_from_outside = (storages.created_op_id == NONE) | (region[storages.created_op_id] == NONE)
    is_kept = is_from_outside & (storages.freed_op_id != NONE)
    rows = np.flatnonzero(is_kept & (last[storages.freed_op_id] != NONE))
    casts.free(rows, last[storages.freed_op_id[rows]])
    calls = casts.draft.module_calls
    ends_so = (calls.parent_call_id == NONE) & (calls.last_op_id != NONE) & (last[calls.last_op_id] != NONE)
    casts.draft.module_calls = calls.replace(last_op_id=np.where(ends_so, last[calls.last_op_id], calls.last_op_id))
    return last


def _held(casts: Casts, is_out: Bools, made_in: Ints) -> Ints:
    """Finds unsaved results of the root module that are still held after its call: they were returned.

    An example is logits next to a loss that the module computes itself.
    """
    step, types = casts.step, casts.types
    uses, freed = step.uses, step.storages.freed_op_id
    is_held = is_out & ((freed == NONE) | (freed > types.region_end[np.maximum(made_in, 0)]))
    is_held[step.saved.storage_id] = False
    is_held[_in_caches(step)] = False
    # What backward reads, or what is freed with the backward of an operator that read it, was kept by a node that does
    # not record saving it, as that of `gather`, which needs only the size.
    is_held[uses.storage_id[types.forward[uses.op_id] != NONE]] = False
    end = freed[uses.storage_id]
    kept_by = np.where(end == NONE, NONE, types.forward[end])
    is_held[uses.storage_id[(kept_by != NONE) & (kept_by == uses.op_id)]] = False
    return np.flatnonzero(is_held)


def _in_caches(step: Step) -> Ints:
    """Returns the storages that were made for a cache of keys and values."""
    is_of_cache = np.array([_CACHES in str(text).partition("\n")[0] for text in step.stacks.frames] + [False])
    created = step.storages.created_op_id
    return np.flatnonzero((created != NONE) & is_of_cache[step.ops.stack_id[created]])
