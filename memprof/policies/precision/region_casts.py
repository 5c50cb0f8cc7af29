"""Inserts autocast's casts of what operators read, and those of the root module's outputs: the loss reads float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.policies.precision.autocast_lists import FLOAT32, PROMOTE, SHORT, VIEW, is_one_of
from memprof.policies.precision.casts import cast_by_code, cast_twice, free_with_copies
from memprof.policies.precision.ends import kept_graphs, own_readers
from memprof.policies.rewrite.autocast_cache import frozen_parameters
from memprof.policies.rewrite.key_caches import cache_ends
from memprof.policies.rewrite.recomputed import saved_by_unfinished_runs
from memprof.policies.rewrite.spans import find_spans
from memprof.policies.rewrite.views_read import bytes_read, reads_callers_view
from memprof.trace.schema import NONE, Bools, Ints

if TYPE_CHECKING:
    from memprof.policies.precision.casts import Casts
    from memprof.trace.step import Step

#: In the stack of what a cache of transformers makes: an object that a plan does not look into for tensors to cast.
_CACHES = "transformers/cache_utils.py:"


def cast_reads(casts: Casts) -> None:
    """Inserts autocast's casts: to the short type for matrix products, to float32 where required."""
    step, types = casts.step, casts.types
    uses, storages = step.uses, step.storages
    rule = types.rule[uses.op_id]
    is_read = (uses.role == "read") & types.is_float[uses.storage_id] & (types.region[uses.op_id] != NONE)
    is_short = types.is_short[uses.storage_id]
    # The float32 result of spelled-out attention is cast for all its readers, whatever their rule.
    is_handed_on = types.is_recast[uses.storage_id] & (types.attention[uses.op_id] == NONE) & (rule != VIEW)
    is_handed_on &= ~types.is_own[uses.op_id]
    to_short = is_read & ((rule == SHORT) | is_handed_on) & ~is_short
    to_float = is_read & is_short & ((rule == FLOAT32) | ((rule == PROMOTE) & ~types.is_short_out[uses.op_id]))
    to_short |= is_read & cast_twice(casts)
    # A recomputation that stops before a product has cast its operands: as late as backward reads them.
    is_prepared = types.is_unfinished & types.is_float[uses.storage_id] & ~is_short
    to_short |= is_prepared & (types.rule[types.origin[uses.op_id]] == SHORT)
    # A function of the job's casts by itself what it multiplies into a tensor of autocast's type, in backward too.
    writes_asked = np.zeros(len(step.ops), dtype=np.bool_)
    writes_asked[uses.op_id[(uses.role == "mutate") & types.is_asked[uses.storage_id]]] = True
    is_own_backward = writes_asked[uses.op_id] & (types.forward[uses.op_id] != NONE) & (uses.role == "read")
    to_short |= is_own_backward & types.is_float[uses.storage_id] & ~is_short & (rule == SHORT)
    rows = np.flatnonzero(to_short | to_float)
    # A trained weight is cast once per region and kept to its end; anything else, views too, is cast at every reader.
    is_weight = ((storages.category == "parameter") & ~frozen_parameters(step))[uses.storage_id[rows]]
    is_weight &= (types.region[uses.op_id[rows]] != NONE) & ~writes_asked[uses.op_id[rows]]
    is_weight &= ~reads_callers_view(step, uses.storage_id[rows], uses.op_id[rows])
    _insert_read_casts(casts, rows, is_weight, to_short[rows])


def cast_inputs(casts: Casts) -> None:
    """Casts the inputs of a model with short weights, once per call."""
    step, types = casts.step, casts.types
    uses, storages = step.uses, step.storages
    created = storages.created_op_id[uses.storage_id]
    region = types.region[uses.op_id]
    is_outside = created == NONE
    is_outside[~is_outside] = types.region[created[~is_outside]] == NONE
    is_data = ~is_one_of(storages.category, ("parameter", "buffer"))[uses.storage_id]
    is_read = (uses.role == "read") & types.is_float[uses.storage_id] & (region != NONE) & is_outside & is_data
    rows = np.flatnonzero(is_read)
    _insert_read_casts(casts, rows, np.ones(len(rows), dtype=np.bool_), np.ones(len(rows), dtype=np.bool_))


def _insert_read_casts(casts: Casts, rows: Ints, is_kept: Bools, to_short: Bools) -> None:
    """Inserts the casts of forward reads.

    Args:
        casts: The step being rewritten.
        rows: Uses redirected to a cast.
        is_kept: Whether one cast serves the whole region, else each operator has its own.
        to_short: Whether to cast to the short type.
    """
    step, types, nodes = casts.step, casts.types, casts.nodes
    uses, storages, saved = step.uses, step.storages, step.saved
    if not len(rows):
        return
    ops, sources = uses.op_id[rows], uses.storage_id[rows]
    region = types.region[ops]
    # The key of a cast: source and, unless it is kept or the job's code makes it for several readers, reader.
    places = len(step.ops) + len(types.region_end)
    readers, holders = own_readers(step, types, nodes, ops, sources)
    # In backward one cast serves the node, which holds it.
    ends = np.where(region == NONE, nodes.end[ops], NONE)
    readers, holders = np.where(region == NONE, ends, readers), np.maximum(holders, ends)
    keys = sources * places + np.where(is_kept, len(step.ops) + region, readers)
    _, first, cast_of = np.unique(keys, return_index=True, return_inverse=True)
    # Arguments are cast from last to first: bias, weight, input. The sizes reveal their order.
    order = np.lexsort((storages.requested_bytes[sources[first]], ~is_kept[first], ops[first]))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    first, cast_of = first[order], rank[cast_of]

    # The readers save the cast, and so do their backward nodes where these are differentiated in turn.
    has_release = saved.released_op_id != NONE
    saver = np.append(types.origin, NONE)[np.where(has_release, saved.released_op_id, saved.forward_op_id)]
    saved_cast = find_spans(saved.storage_id, saver, of=sources, first=ops, last=ops)
    saved_cast = np.append(cast_of, NONE)[saved_cast]
    is_saved = (saved_cast != NONE) & ~saved_by_unfinished_runs(step, types.is_unfinished)
    released = nodes.end[saved.released_op_id]
    released = np.where(saved.released_op_id == NONE, saved.forward_op_id, released)
    last = np.where(is_kept[first], types.region_end[region[first]], ops[first])
    np.maximum.at(last, cast_of, np.maximum(ops, holders))
    np.maximum.at(last, saved_cast[is_saved], released[is_saved])
    # Backward reads of saved tensors; those of a recomputation have no record.
    reader = np.where(types.forward[uses.op_id] != NONE, types.origin[uses.op_id], NONE)
    backward_cast = np.append(cast_of, NONE)[find_spans(uses.storage_id, reader, of=sources, first=ops, last=ops)]
    is_backward = (backward_cast != NONE) & ~types.is_unfinished
    np.maximum.at(last, backward_cast[is_backward], nodes.end[uses.op_id[is_backward]])
    graphs, graph = kept_graphs(step, types, nodes), region[first]
    is_in_graph = np.isin(np.arange(len(first)), saved_cast[is_saved])
    last = np.where(is_in_graph, np.maximum(last, graphs.dropped[graph]), last)
    category = np.zeros(len(first), dtype=np.bool_)
    category[saved_cast[is_saved]] = category[backward_cast[is_backward]] = True
    read, copied_by = cast_by_code(casts, sources[first], ops[first], to_short[first])
    _, made = casts.insert(
        sources[first],
        ops[first],
        ops[first],
        to_short=to_short[first],
        read=read,
        freed=last,
        category="temporary",
        sizes=bytes_read(step, sources[first], ops[first]),
    )
    stays = np.flatnonzero(is_in_graph & (graphs.dropped[graph] == NONE))
    casts.draft.free(made[stays], NONE)
    stays = stays[graphs.dropped_before[graph[stays]] != NONE]
    casts.draft.copy_storages(made[stays], np.full(len(stays), NONE), graphs.dropped_before[graph[stays]])
    kinds = casts.draft.storages.category.copy()
    kinds[made[category]] = "activation"
    # The job's variables hold what its code casts back, not what autocast makes for an operator.
    held = casts.draft.storages.held_op_id.copy()
    held[made[~types.is_recast[sources[first]]]] = NONE
    casts.draft.storages = casts.draft.storages.replace(category=kinds, held_op_id=held)

    casts.redirect(rows, made[cast_of])
    changed = casts.draft.saved.storage_id.copy()
    changed[is_saved] = made[saved_cast[is_saved]]
    savers = np.where(is_saved & has_release, saver, casts.draft.saved.forward_op_id)
    casts.draft.saved = casts.draft.saved.replace(storage_id=changed, forward_op_id=savers)
    casts.redirect(np.flatnonzero(is_backward), made[backward_cast[is_backward]])
    is_gone = is_backward.copy()
    is_gone[rows] = False
    changed_storages = np.unique(np.concatenate([saved.storage_id[is_saved], uses.storage_id[is_backward]]))
    _let_go(casts, changed_storages, is_saved, is_gone)
    free_with_copies(casts, sources[first], ops[first], copied_by)


def _let_go(casts: Casts, storages_changed: Ints, is_recast: Bools, is_redirected: Bools) -> None:
    """Frees activations that were only kept by saved tensors, where a cast is saved instead."""
    step, types, nodes = casts.step, casts.types, casts.nodes
    storages, uses, saved = step.storages, step.uses, step.saved
    is_candidate = np.zeros(len(storages), dtype=np.bool_)
    is_candidate[storages_changed] = True
    is_candidate &= ~is_one_of(storages.category, ("parameter", "buffer"))
    is_candidate &= storages.freed_op_id != NONE
    # If it outlived all its saved-tensor records, something else kept it.
    released = np.full(len(storages), NONE, dtype=np.int64)
    has_release = saved.released_op_id != NONE
    np.maximum.at(released, saved.storage_id[has_release], nodes.next_start[saved.released_op_id[has_release]])
    is_recomputed = step.ops.is_recompute[types.origin[uses.op_id]] & (types.forward[uses.op_id] != NONE)
    np.maximum.at(released, uses.storage_id[is_recomputed], nodes.next_start[uses.op_id[is_recomputed]])
    is_candidate &= storages.freed_op_id <= released
    # Remaining holders: other records, and uses that were not redirected.
    kept = np.full(len(storages), NONE, dtype=np.int64)
    left = has_release & ~is_recast
    np.maximum.at(kept, saved.storage_id[left], nodes.end[saved.released_op_id[left]])
    is_later = (types.forward[uses.op_id] != NONE) & ~is_redirected
    np.maximum.at(kept, uses.storage_id[is_later], nodes.end[uses.op_id[is_later]])
    forward_read = np.full(len(storages), NONE, dtype=np.int64)
    is_forward = types.forward[uses.op_id] == NONE
    np.maximum.at(forward_read, uses.storage_id[is_forward], uses.op_id[is_forward])
    rows = np.flatnonzero(is_candidate & (forward_read != NONE))
    ends = np.maximum(
        nodes.python_end(rows, forward_read[rows]), cache_ends(step, types.region, types.region_end)[rows]
    )
    casts.free(rows, np.minimum(casts.freed[rows], np.maximum(ends, kept[rows])))


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
