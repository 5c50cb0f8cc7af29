"""Inserts casts that no rule of autocast makes: of the root module's outputs, and those of the job's code.

The loss reads outputs in float32. What the code casts to float32 before a product, as ``x.to(self.down.weight.dtype)``
before ``self.down(x)``, autocast casts back; in a step recorded in float32 neither leaves an operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.policies.precision.float32 import calls_of_code
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
    _keep_until_returned(casts, ends, ops)
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


def _keep_until_returned(casts: Casts, ends: Ints, ops: Ints) -> None:
    """Makes a call of the root module end with the casts of its outputs.

    What was made before the call and freed at its end, such as the outputs of the step before in the caller's variable,
    is kept until then.

    Args:
        casts: The step being rewritten.
        ends: The last operator of the call that each cast follows.
        ops: The casts.
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


def cast_twice(casts: Casts) -> Bools:
    """Returns which uses are short tensors that the job's code casts to float32, and autocast back; ``(uses,)``."""
    types, uses = casts.types, casts.step.uses
    created = casts.step.storages.created_op_id[uses.storage_id]
    is_twice: Bools = types.is_given[uses.op_id] & (created != NONE) & ~types.is_given[created]
    return is_twice & types.is_float[uses.storage_id] & types.is_short[uses.storage_id]


def cast_by_code(casts: Casts, sources: Ints, ops: Ints, to_short: Bools) -> tuple[Ints, Ints]:
    """Inserts the float32 copies that autocast casts back; a variable of the code holds them until its function ends.

    Args:
        casts: The step being rewritten.
        sources: Storages that are cast.
        ops: Their readers, in order.
        to_short: Whether they are cast to the short type.

    Returns:
        What these casts read, in ids of the draft; and the operators that copy the sources, NONE for the rest.
    """
    rows = np.flatnonzero(to_short & casts.types.is_short[sources])
    before = ops[rows]
    call, held = calls_of_code(casts.step, before, casts.nodes.innermost)
    # One copy of each source in a call of the code.
    keys = sources[rows] * (len(casts.step.module_calls) + 1) + call + 1
    _, first, copy_of = np.unique(keys, return_index=True, return_inverse=True)
    ends = np.full(len(first), NONE, dtype=np.int64)
    np.maximum.at(ends, copy_of, np.maximum(held, before))
    made_by, copies = casts.insert(
        sources[rows][first],
        before[first],
        before[first],
        to_short=np.zeros(len(first), dtype=np.bool_),
        freed=ends,
        category="temporary",
    )
    read, copied_by = sources.copy(), np.full(len(sources), NONE, dtype=np.int64)
    copied_by[rows], read[rows] = made_by[copy_of], copies[copy_of]
    return read, copied_by


def free_with_copies(casts: Casts, sources: Ints, ops: Ints, copied_by: Ints) -> None:
    """Frees what such a copy replaces: a source that was made in the same call, and that nothing else reads.

    Args:
        casts: The step being rewritten, after the casts read the copies.
        sources: Storages that are cast.
        ops: Their readers, as many.
        copied_by: The operators that copy them, NONE for none.
    """
    step, uses, count = casts.step, casts.step.uses, len(casts.step.ops)
    rows = np.flatnonzero(copied_by != NONE)
    of, before = sources[rows], ops[rows]
    call, held = calls_of_code(step, before, casts.nodes.innermost)
    begin = np.full(len(step.storages), count, dtype=np.int64)
    np.minimum.at(begin, of, before)
    is_other = (casts.types.forward[uses.op_id] == NONE) & (uses.op_id >= begin[uses.storage_id])
    is_other &= ~np.isin(uses.storage_id * count + uses.op_id, of * count + before)
    is_local = (call != NONE) & (step.storages.created_op_id[of] >= step.module_calls.first_op_id[call])
    is_local &= ~np.isin(of, uses.storage_id[is_other])
    is_local &= (casts.freed[of] != NONE) & (casts.freed[of] <= held)
    casts.free(of[is_local], copied_by[rows[is_local]])


def cast_their_gradients(casts: Casts, is_short: Bools) -> None:
    """Inserts the casts of backward: the gradient of such a product's input becomes float32, and short again.

    Args:
        casts: The step being rewritten, with all other casts.
        is_short: Which recorded storages leave their operator short, ``(storages,)``.
    """
    step, types = casts.step, casts.types
    storages, uses = step.storages, step.uses
    rows = np.flatnonzero(cast_twice(casts))
    size = np.full(len(step.ops), NONE, dtype=np.int64)
    size[uses.op_id[rows]] = storages.requested_bytes[uses.storage_id[rows]]
    created = storages.created_op_id
    owner = np.where(created != NONE, types.forward[created], NONE)
    is_gradient = is_short & (owner != NONE) & (storages.category != "gradient")
    is_gradient &= storages.requested_bytes == size[owner]
    # Before the node that reads it next.
    is_read = is_gradient[uses.storage_id] & (types.forward[uses.op_id] != owner[uses.storage_id])
    is_read &= uses.op_id > created[uses.storage_id]
    begin = np.full(len(storages), len(step.ops), dtype=np.int64)
    np.minimum.at(begin, uses.storage_id[is_read], uses.op_id[is_read])
    found = np.flatnonzero(is_gradient & (begin < len(step.ops)))
    found = found[np.argsort(begin[found], kind="stable")]
    before, like = begin[found], created[found]
    is_wide = np.zeros(len(found), dtype=np.bool_)
    category = "temporary"
    copied_by, copies = casts.insert(found, before, like, to_short=is_wide, freed=before, category=category)
    shortened_by, made = casts.insert(
        found, before, like, to_short=~is_wide, freed=casts.freed[found], category=category, read=copies
    )
    casts.draft.free(copies, shortened_by)
    became = np.full(len(storages), NONE, dtype=np.int64)
    became[found] = made
    rows = np.flatnonzero((became[uses.storage_id] != NONE) & (uses.op_id >= begin[uses.storage_id]))
    casts.redirect(rows, became[uses.storage_id[rows]])
    casts.free(found, copied_by)
