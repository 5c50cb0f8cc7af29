"""Rewrites gradients: their types, and the casts between backward nodes.

A gradient has the type of its forward tensor. Where a matrix product read a cast, its gradients leave the node short
and the cast's own backward makes them float32; where a float32 sum had a short operand, the engine casts the gradient
to the type of that operand's producer. Gradients of a weight cast once are summed short, then cast once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memprof.policies.precision.autocast_lists import FIRST, LASTING, VIEW, is_one_of
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import rows_of

if TYPE_CHECKING:
    from memprof.policies.precision.casts import Casts


@dataclass(frozen=True, eq=False)
class _Backward:
    """Columns of the recorded backward.

    Attributes:
        forward: Forward operator of each operator, ``(ops,)``.
        is_sum: Whether it accumulates the gradients of a tensor used several times, ``(ops,)``.
        is_made: Whether a float32 storage is produced by the backward of an operator, ``(storages,)``.
        owner: The forward operator whose backward produces it, ``(storages,)``.
        is_gradient: Whether it becomes a parameter's gradient, ``(storages,)``.
        target: Storage that a sum is written to, ``(ops,)``.
    """

    forward: Ints
    is_sum: Bools
    is_made: Bools
    owner: Ints
    is_gradient: Bools
    target: Ints


def _read_backward(casts: Casts) -> _Backward:
    step, types = casts.step, casts.types
    storages, uses = step.storages, step.uses
    forward = types.forward
    is_sum = is_one_of(types.names, ("add", "add_")) & (forward != NONE)
    owner = np.where(storages.created_op_id != NONE, forward[storages.created_op_id], NONE)
    is_made = types.is_float & (owner != NONE)
    target = np.full(len(step.ops), NONE, dtype=np.int64)
    writes = np.flatnonzero((uses.role != "read") & is_sum[uses.op_id])
    target[uses.op_id[writes]] = uses.storage_id[writes]
    return _Backward(
        forward=forward,
        is_sum=is_sum,
        is_made=is_made,
        owner=owner,
        is_gradient=is_made & (storages.category == "gradient"),
        target=target,
    )


def short_gradients(casts: Casts) -> Bools:
    """Returns which storages of the backward leave their node in the short type, shape ``(storages,)``."""
    step, types = casts.step, casts.types
    backward = _read_backward(casts)
    owner = np.maximum(backward.owner, 0)
    is_short = backward.is_made & types.is_short_out[owner]
    # A norm's gradients of float32 weights are float32 whatever its input type.
    is_short &= (types.rule[owner] != FIRST) | types.is_primary
    is_short &= ~made_whole(casts)
    is_short |= types.is_asked & backward.is_made
    # A sum into new memory has the type that its consumer expects: the widest.
    made_by_sum = backward.is_made & backward.is_sum[np.maximum(step.storages.created_op_id, 0)]
    uses = step.uses
    reader = backward.forward[uses.op_id]
    is_read = made_by_sum[uses.storage_id] & (reader != NONE) & ~backward.is_sum[uses.op_id]
    is_read &= uses.op_id != step.storages.created_op_id[uses.storage_id]
    is_wide = _sums_of_wide(casts, backward)
    has_reader = is_wide.copy()
    is_wide[uses.storage_id[is_read & ~types.is_short_out[reader]]] = True
    has_reader[uses.storage_id[is_read]] = True
    short: Bools = np.where(made_by_sum & has_reader, ~is_wide, is_short)
    return short


def made_whole(casts: Casts) -> Bools:
    """Finds gradients that oneDNN's recurrent layers produce in float32 in any compute type, ``(storages,)``."""
    types, created = casts.types, casts.step.storages.created_op_id
    whole: Bools = types.is_float & (created != NONE)
    whole[whole] = types.names[created[whole]] == "mkldnn_rnn_layer_backward"
    return whole


def cast_gradients(casts: Casts, is_short: Bools, *, is_pure: bool, is_scaled: bool) -> None:
    """Inserts the casts of the backward.

    Args:
        casts: The step being rewritten.
        is_short: Which recorded storages leave their operator short, ``(storages,)``.
        is_pure: Whether weights and their gradients are short, and therefore not cast.
        is_scaled: Whether gradients are scaled on entering the model and unscaled on leaving it.
    """
    backward = _read_backward(casts)
    _cast_between_nodes(casts, backward, is_short, is_pure=is_pure, is_scaled=is_scaled)
    due = made_whole(casts) if is_pure else is_short
    _cast_weight_gradients(casts, backward, due, to_short=is_pure, is_scaled=is_scaled)


def _cast_between_nodes(casts: Casts, backward: _Backward, is_short: Bools, *, is_pure: bool, is_scaled: bool) -> None:
    step, types, nodes = casts.step, casts.types, casts.nodes
    uses, storages = step.uses, step.storages
    op, storage = uses.op_id, uses.storage_id
    reader = backward.forward[op]
    is_sum = backward.is_sum[op]
    target = backward.target[op]
    # Candidates for a cast: gradients between nodes, read by another node than the one that produces them.
    is_between = backward.is_made[storage] & ~backward.is_gradient[storage] & (op > storages.created_op_id[storage])
    is_between &= (reader != backward.owner[storage]) | is_sum
    is_between &= (uses.role == "read") | is_sum
    into_gradient = is_sum & ((storages.category == "gradient")[np.maximum(target, 0)])
    is_between &= ~into_gradient & ~_is_view_of_weight(casts)[np.maximum(reader, 0)]
    is_outside = types.region[np.maximum(backward.owner[storage], 0)] == NONE
    if is_pure:
        is_between &= reader != NONE
    # Summed gradients have the type of their tensor, which is what the readers expect.
    expected = np.where(reader == NONE, False, types.is_short_out[np.maximum(reader, 0)])
    sum_is_short = _summed_type(casts, backward, is_between, expected, is_short)
    expected = np.where(is_sum, sum_is_short[np.maximum(target, 0)], expected)
    if is_pure:
        # Inside the model everything is short, except what comes from the loss, and what the job's code casts.
        is_own = types.is_own[np.maximum(reader, 0)] | types.is_own[np.maximum(backward.owner[storage], 0)]
        is_between &= is_own | (is_outside & (types.region[np.maximum(reader, 0)] != NONE))
        expected |= ~is_own
    rows = np.flatnonzero(is_between & (expected != is_short[storage]) & (types.region[op] == NONE))
    if not len(rows):
        return
    # One cast of each gradient, and another after each gradient that is added to it in place.
    readers = op[rows]
    writers = _last_sums(backward, storage[rows], readers)
    (sources, writers), cast_of = np.unique([storage[rows], writers], axis=1, return_inverse=True)
    begin = np.full(len(sources), len(step.ops), dtype=np.int64)
    np.minimum.at(begin, cast_of, readers)
    last = np.full(len(sources), NONE, dtype=np.int64)
    np.maximum.at(last, cast_of, readers)
    other = np.full(len(storages), NONE, dtype=np.int64)
    is_other = np.ones(len(op), dtype=np.bool_)
    is_other[rows] = False
    np.maximum.at(other, storage[is_other], op[is_other])
    other = other[sources]
    recorded = storages.freed_op_id[sources]
    is_final = np.append(sources[1:] != sources[:-1], True)
    is_last = is_final & (last >= other)
    freed = np.where(is_last & (recorded != NONE), np.maximum(recorded, last), nodes.end[last])
    order = np.argsort(begin, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    columns = (sources, writers, begin, freed, other, is_last, is_final)
    sources, writers, begin, freed, other, is_last, is_final = (column[order] for column in columns)
    like = np.maximum(writers, storages.created_op_id[sources])
    made_ops, made = casts.insert(sources, begin, like, to_short=~is_short[sources], freed=freed, category="temporary")
    casts.redirect(rows, made[rank[cast_of]])
    # A backward graph (create_graph, reentrant checkpoints) lists gradients as saved; it keeps the cast instead.
    casts.draft.unsave(sources)
    # The source is freed with its cast, unless it is read in its own type later.
    ends = np.where(is_last, np.where(other >= begin, nodes.end[other], made_ops), casts.freed[sources])
    casts.free(sources[is_final], ends[is_final])
    if is_scaled:
        # Scaling allocates an intermediate float32 copy.
        enters = types.region[np.maximum(backward.owner[sources], 0)] == NONE
        workspace = casts.draft.ops.workspace_bytes.copy()
        workspace[made_ops[enters]] = storages.requested_bytes[sources[enters]]
        casts.draft.ops = casts.draft.ops.replace(workspace_bytes=workspace)


def _last_sums(backward: _Backward, storage: Ints, before: Ints) -> Ints:
    """Returns the last operator that adds to each gradient before some operator; NONE if none does."""
    sums = np.flatnonzero(backward.is_sum & (backward.target != NONE))
    total = len(backward.target)
    keys = backward.target[sums] * total + sums
    order = np.argsort(keys)
    place = np.searchsorted(keys[order], storage * total + before) - 1
    found = np.append(sums[order], NONE)[place]
    return np.where(np.append(backward.target, NONE)[found] == storage, found, NONE)


def _summed_type(casts: Casts, backward: _Backward, is_between: Bools, expected: Bools, is_short: Bools) -> Bools:
    """Returns which sums of gradients are short: of a short tensor, where all readers of the whole sum expect it."""
    uses = casts.step.uses
    is_target = np.zeros(len(is_short), dtype=np.bool_)
    is_target[backward.target[backward.target != NONE]] = True
    is_reader = is_between & ~backward.is_sum[uses.op_id] & is_target[uses.storage_id]
    result = is_short.copy()
    result[uses.storage_id[is_reader]] = True
    result[uses.storage_id[is_reader & ~expected]] = False
    result[_sums_of_wide(casts, backward)] = False
    return result


def _sums_of_wide(casts: Casts, backward: _Backward) -> Bools:
    """Returns which storages hold a sum of gradients of a float32 tensor, ``(storages,)``.

    The tensor is what the forward operator of the last gradient read. The sum's readers do not show its type where it
    passes through additions, as in residual connections: these have no operators in backward.
    """
    step, types = casts.step, casts.types
    uses, storages = step.uses, step.storages
    sums = np.flatnonzero(backward.is_sum & (backward.target != NONE))
    created = storages.created_op_id
    is_wide_inside = types.is_float & ~types.is_short & (created != NONE) & (types.region[created] != NONE)
    is_input = (uses.role == "read") & is_wide_inside[uses.storage_id]
    rows, times = rows_of(uses.op_id[is_input], backward.forward[sums])
    given = uses.storage_id[is_input][rows]
    target = np.repeat(backward.target[sums], times)
    is_alike = storages.requested_bytes[given] == storages.requested_bytes[target]
    is_wide = np.zeros(len(storages), dtype=np.bool_)
    is_wide[target[is_alike]] = True
    return is_wide


def _is_view_of_weight(casts: Casts) -> Bools:
    """Returns which forward operators are views of weights, ``(ops,)``: their backward carries weight gradients."""
    step, types = casts.step, casts.types
    uses = step.uses
    is_weight = is_one_of(step.storages.category, LASTING)[uses.storage_id] & (uses.role == "read")
    views = np.zeros(len(step.ops), dtype=np.bool_)
    views[uses.op_id[is_weight & (types.rule[uses.op_id] == VIEW)]] = True
    return views


def _next_use(casts: Casts, gradients: Ints, last: Ints) -> Ints:
    """Returns the operator that next uses each completed gradient, apart from views: AccumulateGrad detaches it."""
    uses, count = casts.step.uses, len(casts.step.ops)
    complete = np.full(len(casts.step.storages), count, dtype=np.int64)
    complete[gradients] = last
    is_use = (casts.types.rule != VIEW) | (casts.types.names == "detach")
    is_later = (uses.op_id > complete[uses.storage_id]) & is_use[uses.op_id]
    found = np.full(len(complete), count, dtype=np.int64)
    np.minimum.at(found, uses.storage_id[is_later], uses.op_id[is_later])
    return found[gradients]


def _cast_weight_gradients(
    casts: Casts, backward: _Backward, is_short: Bools, *, to_short: bool, is_scaled: bool
) -> None:
    """Casts weight gradients to the weights' type once all those of a region are summed, and unscales them.

    Args:
        casts: The step being rewritten.
        backward: Columns of its backward.
        is_short: Which storages are in another type than the weights.
        to_short: Whether the weights are short.
        is_scaled: Whether gradients are unscaled.
    """
    step, nodes = casts.step, casts.nodes
    uses, storages = step.uses, step.storages
    gradients = np.flatnonzero(backward.is_gradient & (is_short | is_scaled))
    if not len(gradients):
        return
    # The last operator that adds a short gradient.
    last = np.full(len(storages), NONE, dtype=np.int64)
    last[gradients] = storages.created_op_id[gradients]
    target = backward.target[uses.op_id]
    is_added = backward.is_sum[uses.op_id] & (target != NONE) & (uses.storage_id != target)
    is_added &= backward.is_made[uses.storage_id] & (is_short[uses.storage_id] | is_scaled)
    np.maximum.at(last, target[is_added], uses.op_id[is_added])
    last = last[gradients]
    # Before the next node, or before an update that depends only on this gradient.
    place = np.minimum(nodes.next_start[last], _next_use(casts, gradients, last))
    order = np.lexsort((last, place))
    gradients, last, place = gradients[order], last[order], place[order]
    like = storages.created_op_id[gradients]
    current = gradients.copy()
    holders: list[tuple[Ints, Ints]] = []
    for is_due, name in (
        (is_short[gradients], "aten._to_copy.default"),
        (np.full(len(gradients), is_scaled), "aten.mul.Tensor"),
    ):
        due = np.flatnonzero(is_due)
        if not len(due):
            continue
        ops, made = casts.insert(
            gradients[due],
            place[due],
            like[due],
            to_short=np.full(len(due), to_short),
            freed=np.full(len(due), NONE),
            category="temporary",
            name=name,
            read=current[due],
        )
        holders.append((current[due], ops))
        current[due] = made
    # Each operator of the chain frees its input; the last result is the gradient.
    lives = casts.draft.storages.freed_op_id.copy()
    kinds = casts.draft.storages.category.copy()
    names = casts.draft.storages.name.copy()
    modules = casts.draft.storages.module_id.copy()
    for holder, ops in holders:
        recorded = holder < len(storages)
        casts.free(holder[recorded], ops[recorded])
        lives[holder[~recorded]] = ops[~recorded]
        kinds[holder] = "temporary"
        names[holder] = ""
    lives[current] = storages.freed_op_id[gradients]
    kinds[current] = "gradient"
    names[current] = storages.name[gradients]
    modules[current] = storages.module_id[gradients]
    casts.draft.storages = casts.draft.storages.replace(
        freed_op_id=lives, category=kinds, name=names, module_id=modules
    )
    became = np.full(len(storages), NONE, dtype=np.int64)
    became[gradients] = current
    until = np.full(len(storages), len(step.ops), dtype=np.int64)
    until[gradients] = place
    rows = np.flatnonzero((became[uses.storage_id] != NONE) & (uses.op_id >= until[uses.storage_id]))
    casts.redirect(rows, became[uses.storage_id[rows]])
