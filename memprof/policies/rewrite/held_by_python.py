"""What Python holds after forward: local variables, caches of keys and values, and what a step leaves behind.

A cache of transformers begins as two empty tensors of the keys' type, to which the first keys and values are
concatenated, one after the other. The recording has no storage for an empty tensor.
"""

from __future__ import annotations

import numpy as np

from memprof.trace.files.coded import coded_column
from memprof.trace.operator_facts import CAT, LIFT
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step

#: Modules that pass each result on at once, under one name.
_CHAINS = ("Sequential",)
#: Operators before the first values within which the empty tensors are made.
_NEAR = 8


def variable_ends(step: Step, rows: Ints, calls: Ints, after: Ints) -> Ints:
    """Returns until when a local variable of a module's forward holds each storage.

    It is assumed to hold it until reassigned, taken to be the next tensor of the same shape, or until forward returns.
    (``x = norm(x); y = head(x); loss = f(y)``: x lives until the end.)

    Args:
        step: The step.
        rows: The storages.
        calls: Row of the module call whose forward may hold each, NONE for none.
        after: Operator up to which each is needed in any case, within the call.

    Returns:
        Operators, as long as ``rows``; NONE where no variable holds a storage.
    """
    created = step.storages.created_op_id
    passes_on = np.isin(step.modules.type, _CHAINS)[step.module_calls.module_id]
    is_held = (calls != NONE) & (created[rows] != NONE)
    is_held[is_held] = ~passes_on[calls[is_held]]
    ends = np.full(len(rows), NONE, dtype=np.int64)
    returns = step.module_calls.last_op_id[calls[is_held]]
    # Storages in order of their shapes, and of when they were made: the one behind is the next of the same shape.
    span = len(step.ops)
    shapes = coded_column(step.storages, "shape").codes.astype(np.int64)
    made = np.sort((shapes * span + created)[created != NONE])
    wanted = shapes[rows[is_held]] * span
    place = np.searchsorted(made, wanted + after[is_held], side="right")
    behind = np.append(made, np.iinfo(np.int64).max)[place] - wanted
    ends[is_held] = np.minimum(behind, returns)
    return ends


def result_ends(step: Step, inner: Ints) -> Ints:
    """Returns until when the results of a module's forward may hold each storage made in it, ``(storages,)``.

    A model may return more than the next layer needs, such as attention's weights in an object beside its output. This
    shows in storages that live on after the forward has returned although nothing uses them and no node has saved them.
    Others of their shape that the same call made may be held as long, or that the calls in the same forward returned;
    NONE for the rest. Where a module is called several times in a forward and only what its last call left lives on, as
    the state of a cell does, that of each call took the place of the one before: the other calls' are not held.

    Args:
        step: The step.
        inner: The innermost call of each operator, NONE outside, shape ``(ops,)``.
    """
    storages, uses, calls = step.storages, step.uses, step.module_calls
    created, count = storages.created_op_id, len(storages)
    call = np.where(created != NONE, inner[created], NONE)
    around = np.where(call != NONE, np.append(calls.parent_call_id, NONE)[call], NONE)
    used = np.full(count, NONE, dtype=np.int64)
    np.maximum.at(used, uses.storage_id, uses.op_id)
    is_saved = np.zeros(count, dtype=np.bool_)
    is_saved[step.saved.storage_id] = True
    freed = np.where(storages.freed_op_id == NONE, len(step.ops), storages.freed_op_id)
    shapes = coded_column(storages, "shape")
    found = np.full(count, NONE, dtype=np.int64)
    for one in (call, around):
        returned = np.append(calls.last_op_id, NONE)[one]
        is_left = (one != NONE) & ~is_saved & (used <= returned) & (freed > returned)
        if one is around:
            is_left &= ~_is_replaced(step, one, (one != NONE) & ~is_saved & (freed <= returned))
        keys = one * len(shapes.distinct) + shapes.codes
        ends = np.full(int(keys.max(initial=NONE)) + 1, NONE, dtype=np.int64)
        np.maximum.at(ends, keys[is_left], freed[is_left])
        found[one != NONE] = np.maximum(found[one != NONE], ends[keys[one != NONE]])
    return found


def _is_replaced(step: Step, calls: Ints, is_freed: Bools) -> Bools:
    """Marks storages like which others were freed before their call returned: made at the same place of the code.

    Args:
        step: The step.
        calls: A call for each storage, within which others are compared with it; NONE for none.
        is_freed: Storages that nothing held until that call returned.
    """
    ops, created = step.ops, step.storages.created_op_id
    made = np.where(created != NONE, created, 0)
    shapes, names = coded_column(step.storages, "shape").codes, coded_column(ops, "name").codes
    places = np.stack([calls, shapes, names[made], ops.module_id[made], ops.stack_id[made]], axis=1)
    _, place = np.unique(places, axis=0, return_inverse=True)
    has_freed = np.zeros(int(place.max(initial=NONE)) + 1, dtype=np.bool_)
    has_freed[place[is_freed]] = True
    return has_freed[place]


def carried_over(step: Step, is_made: Bools) -> Ints:
    """Returns, for each storage that outlives the iteration, the previous iteration's that this one freed, or NONE."""
    storages = step.storages
    left = np.full(len(storages), NONE, dtype=np.int64)
    outlives = np.flatnonzero(is_made & (storages.freed_op_id == NONE))
    waiting: dict[int, list[int]] = {}
    is_old = (storages.created_op_id == NONE) & (storages.freed_op_id != NONE) & (storages.category != "gradient")
    for row in np.flatnonzero(is_old)[::-1].tolist():
        waiting.setdefault(int(storages.requested_bytes[row]), []).append(row)
    for row in outlives.tolist():
        alike = waiting.get(int(storages.requested_bytes[row]))
        if alike:
            left[row] = alike.pop()
    return left


def first_values(step: Step) -> Ints:
    """Returns the operators that put the first values into a cache; those before each put the first keys into it."""
    ops, uses = step.ops, step.uses
    reads = np.bincount(uses.op_id[uses.role == "read"], minlength=len(ops))
    is_empty = (ops.name == LIFT) & (np.bincount(uses.op_id, minlength=len(ops)) == 0)
    is_first = (ops.name == CAT) & (reads == 1)
    values = np.flatnonzero(is_first[1:] & is_first[:-1] & (ops.module_id[1:] == ops.module_id[:-1])) + 1
    empty = np.append(0, np.cumsum(is_empty))
    found: Ints = values[empty[values] - empty[np.maximum(values - _NEAR, 0)] >= 2]
    return found


def cached_storages(step: Step) -> Ints:
    """Returns the storages that were made for a cache of keys and values."""
    values = first_values(step)
    created = step.storages.created_op_id
    return np.flatnonzero(np.isin(created, np.append(values, values - 1)) & (created != NONE))
