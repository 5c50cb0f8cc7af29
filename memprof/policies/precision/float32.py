"""Finds what stays in float32 under autocast, or with weights in the short type, and what a job casts to it itself."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from memprof.policies.precision.autocast_lists import FIRST, FLOAT32, LASTING, RECURRENT, SHORT, is_one_of
from memprof.policies.rewrite.key_caches import first_values
from memprof.replay.directed import reached
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.source_lines import function_of, is_of_torch

if TYPE_CHECKING:
    from memprof.trace.step import Step

#: In stacks: where torch calls a module's forward.
_MODULE_CALL = ":_call_impl"


def reached_by_float32(
    step: Step, rule: Ints, is_float: Bools, is_inside: Bools, is_recast: Bools, is_like: Bools, *, is_pure: bool
) -> Bools:
    """Propagates float32 from its sources: one float32 operand makes the result float32.

    Sources are tensors from outside and the results of float32 operators and factories; short operators end the path.
    A storage is float32 if it is reachable, short otherwise.
    """
    storages, uses = step.storages, step.uses
    created = storages.created_op_id
    made_rule = np.where(created != NONE, rule[created], NONE)
    # Zero-dimensional tensors do not promote those with dimensions.
    is_read = (uses.role != "write") & is_float[uses.storage_id] & (storages.shape[uses.storage_id] != "")
    is_read &= (rule[uses.op_id] != SHORT) & ~is_recast[uses.storage_id]
    is_read &= (rule[uses.op_id] != FIRST) | _is_normalized(step, rule)
    reads_op, reads_storage = uses.op_id[is_read], uses.storage_id[is_read]
    targets = np.flatnonzero(is_inside & (made_rule != SHORT) & (made_rule != FLOAT32))
    # Edges through operators: storage -> operator -> storage; operators come after the storages, then the source.
    count = len(storages)
    has_read = np.zeros(len(step.ops), dtype=np.bool_)
    has_read[reads_op] = True
    reads_recast = np.zeros(len(step.ops), dtype=np.bool_)
    reads_recast[uses.op_id[is_recast[uses.storage_id]]] = True
    is_source = is_inside & (made_rule == FLOAT32)
    is_factory = np.zeros(count, dtype=np.bool_)
    if not is_pure:
        # With short weights nothing else is float32: inputs are cast, and factories take their operands' type.
        is_source |= is_float & ~is_inside
        is_factory[targets] = ~has_read[created[targets]] & ~reads_recast[created[targets]]
        is_factory[is_like] = False
    inputs, states = _first_states(step, is_factory, is_float)
    is_factory[states] = False
    sources = np.flatnonzero(is_source | is_factory)
    values = first_values(step)
    # Concatenated with an empty tensor of the keys' type, values are as wide as these.
    is_key = np.isin(uses.op_id + 1, values) & (uses.role == "read")
    start = count + len(step.ops)
    tails = np.concatenate(
        [reads_storage, count + created[targets], np.full(len(sources), start), inputs, uses.storage_id[is_key]]
    )
    heads = np.concatenate([count + reads_op, targets, sources, states, count + uses.op_id[is_key] + 1])
    return reached(start, tails, heads, start + 1)[:count]


def _first_states(step: Step, is_factory: Bools, is_float: Bools) -> tuple[Ints, Ints]:
    """Pairs the inputs of recurrent layers with the zeros these begin with, which have the type of the input.

    Returns:
        Inputs and zeros, as storages.
    """
    storages, uses, calls = step.storages, step.uses, step.module_calls
    is_weight = np.isin(storages.category, LASTING)
    pairs = [(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))]
    is_recurrent = is_one_of(step.modules.type, RECURRENT)[calls.module_id] & (calls.first_op_id != NONE)
    for call in np.flatnonzero(is_recurrent).tolist():
        first, last = calls.first_op_id[call], calls.last_op_id[call]
        states = np.flatnonzero(is_factory & (storages.created_op_id >= first) & (storages.created_op_id <= last))
        read = np.unique(uses.storage_id[(uses.op_id >= first) & (uses.op_id <= last)])
        inputs = read[is_float[read] & ~is_weight[read] & (storages.created_op_id[read] < first)]
        pairs.append((np.repeat(inputs, len(states)), np.tile(states, len(inputs))))
    found, made = (np.concatenate(columns) for columns in zip(*pairs, strict=True))
    return found, made


def _is_normalized(step: Step, rule: Ints) -> Bools:
    """Returns which uses are a norm's normalized input, the largest tensor it reads besides weights; ``(uses,)``."""
    uses = step.uses
    is_read = (rule[uses.op_id] == FIRST) & (uses.role == "read")
    sizes = np.where(is_read, step.storages.requested_bytes[uses.storage_id], 0)
    largest = np.zeros(len(step.ops), dtype=np.int64)
    np.maximum.at(largest, uses.op_id, sizes)
    normalized: Bools = is_read & (sizes == largest[uses.op_id])
    return normalized


def may_cast(step: Step) -> Bools:
    """Returns which operators the job's code may give tensors of another type, unseen in float32, ``(ops,)``."""
    if step.own_casts is None:
        return np.ones(len(step.ops), dtype=np.bool_)
    return np.isin(step.ops.stack_id, [NONE, *step.own_casts])


def runs_float32(step: Step, *, is_pure: bool) -> Bools:
    """Returns which operators the job's code gives operands in float32, ``(ops,)``.

    Args:
        step: The step.
        is_pure: Whether weights are short: what is cast to their type is short then.
    """
    stacks = step.own_float32 if is_pure else step.own_float32 | step.own_weight_type
    is_own: Bools = np.isin(step.ops.stack_id, list(stacks))
    return is_own


def calls_of_code(step: Step, ops: Ints, innermost: Ints) -> tuple[Ints, Ints]:
    """Returns the module calls whose code casts the operands of operators, and until when that code holds the cast.

    It holds it in a variable if the operator is one of a module of torch that the code calls. Rows of other operators
    are the innermost module call, and NONE.

    Args:
        step: The step.
        ops: The operators.
        innermost: The innermost module call of each of the step's operators, NONE outside, ``(ops,)``.

    Returns:
        Rows of module calls, NONE for none, and operators; both as long as ``ops``.
    """
    frames = dict(zip(step.stacks.stack_id.tolist(), map(str, step.stacks.frames.tolist()), strict=True))
    stack_of, calls, ends = step.ops.stack_id.tolist(), innermost[ops], np.full(len(ops), NONE, dtype=np.int64)
    outside: dict[str, Ints] = {}
    own = step.own_float32 | step.own_weight_type
    of_code = [(row, op) for row, op in enumerate(ops.tolist()) if stack_of[op] in own]
    stacks_of = _stacks_of_functions(frames) if of_code else {}
    for row, op in of_code:
        lines = frames[stack_of[op]].splitlines()
        of_torch = list(takewhile(is_of_torch, lines))
        depth = sum(_MODULE_CALL in line for line in of_torch)
        if not depth:
            continue
        for _ in range(depth):
            calls[row] = step.module_calls.parent_call_id[calls[row]] if calls[row] != NONE else NONE
        function = function_of(lines[len(of_torch)])
        if function not in outside:
            # In recomputations, what is saved is detached outside it.
            is_run = (step.ops.phase == "forward") | (innermost != NONE)
            is_inside = (np.isin(step.ops.stack_id, stacks_of[function]) & is_run) | (step.ops.kind == "view")
            outside[function] = np.append(np.flatnonzero(~is_inside), len(step.ops))
        ends[row] = outside[function][np.searchsorted(outside[function], op)] - 1
        if calls[row] != NONE:
            ends[row] = min(ends[row], step.module_calls.last_op_id[calls[row]])
    return calls, ends


def _stacks_of_functions(frames: dict[int, str]) -> dict[str, list[int]]:
    """Returns the ids of the stacks that each function is in."""
    found: dict[str, list[int]] = {}
    for number, text in frames.items():
        for function in set(map(function_of, text.splitlines())):
            found.setdefault(function, []).append(number)
    return found


def made_like_short(step: Step, is_short: Bools) -> Bools:
    """Returns which tensors the code makes in the type of another that is short, ``(storages,)``.

    That is where the module's call is given short tensors and no others.

    Args:
        step: The step.
        is_short: Which storages are short as far as is known, ``(storages,)``.
    """
    storages, uses, calls = step.storages, step.uses, step.module_calls
    created = storages.created_op_id
    is_like: Bools = (created != NONE) & (storages.dtype == "float32")
    is_like[is_like] = np.isin(step.ops.stack_id[created[is_like]], list(step.made_like))
    reads_float = np.zeros(len(step.ops), dtype=np.bool_)
    reads_float[uses.op_id[(uses.role != "write") & (storages.dtype == "float32")[uses.storage_id]]] = True
    is_like[is_like] = ~reads_float[created[is_like]]
    is_activation = (storages.dtype == "float32") & ~is_one_of(storages.category, LASTING)
    for storage in np.flatnonzero(is_like).tolist():
        around = (calls.first_op_id <= created[storage]) & (calls.last_op_id >= created[storage])
        first = calls.first_op_id[around].max(initial=NONE)
        last = calls.last_op_id[around & (calls.first_op_id == first)].min(initial=len(step.ops))
        given = uses.storage_id[(uses.op_id >= first) & (uses.op_id <= last) & (uses.role == "read")]
        given = given[is_activation[given] & (created[given] < first)]
        is_like[storage] = first != NONE and len(given) > 0 and bool(is_short[given].all())
    return is_like


def casts_to_arguments(step: Step) -> tuple[Ints, Ints]:
    """Finds what the code casts to the type of an argument of its function: the largest that the function is given.

    Returns:
        Storages in float32 that are read after such a cast, and those arguments, as long.
    """
    storages, uses, created = step.storages, step.uses, step.storages.created_op_id
    is_activation = (storages.dtype == "float32") & ~is_one_of(storages.category, LASTING)
    is_after = np.isin(step.ops.stack_id, list(step.in_argument_type))
    is_read = is_after[uses.op_id] & (uses.role == "read") & is_activation[uses.storage_id]
    is_read &= (created[uses.storage_id] != NONE) & ~is_after[created[uses.storage_id]]
    found, readers = uses.storage_id[is_read], uses.op_id[is_read]
    found, first = np.unique(found, return_index=True)
    frames = dict(zip(step.stacks.stack_id.tolist(), map(str, step.stacks.frames.tolist()), strict=True))
    stacks_of = _stacks_of_functions(frames) if len(found) else {}
    pairs = []
    for storage, reader in zip(found.tolist(), readers[first].tolist(), strict=True):
        lines = frames[int(step.ops.stack_id[reader])].splitlines()
        function = function_of(next(line for line in lines if not is_of_torch(line)))
        outside = np.flatnonzero(~np.isin(step.ops.stack_id, stacks_of[function]))
        place = np.searchsorted(outside, reader)
        begin = outside[place - 1] + 1 if place else 0
        end = outside[place] if place < len(outside) else len(step.ops)
        given = uses.storage_id[(uses.op_id >= begin) & (uses.op_id < end) & is_activation[uses.storage_id]]
        given = given[created[given] < begin]
        if len(given):
            pairs.append((storage, int(given[storages.requested_bytes[given].argmax()])))
    cast, arguments = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return cast, arguments


def cast_back(step: Step, is_own: Bools, is_short: Bools) -> Bools:
    """Returns which results of such operators are cast back to the short type for all other readers, ``(storages,)``.

    The code casts to the type of what it was given, which shows in what the first of these operators read.

    Args:
        step: The step.
        is_own: Which operators run in float32 by the job's code, ``(ops,)``.
        is_short: Which storages are short as far as is known, ``(storages,)``.
    """
    storages, uses = step.storages, step.uses
    made_by = np.where(storages.created_op_id != NONE, storages.created_op_id, 0)
    is_made = (storages.created_op_id != NONE) & is_own[made_by] & (storages.dtype == "float32")
    is_read = is_own[uses.op_id] & (uses.role == "read") & ~is_one_of(storages.category, LASTING)[uses.storage_id]
    op, storage = uses.op_id[is_read], uses.storage_id[is_read]
    was_short = np.zeros(len(step.ops), dtype=np.bool_)
    was_short[op[is_short[storage]]] = True
    is_inner = is_made[storage]
    op, maker = op[is_inner], made_by[storage[is_inner]]
    while np.any(was_short[maker] & ~was_short[op]):
        was_short[op[was_short[maker]]] = True
    back: Bools = is_made & was_short[made_by]
    back[back] = np.isin(step.ops.stack_id[made_by[back]], list(step.casts_back))
    return back
