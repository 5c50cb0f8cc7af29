"""What the job's code casts itself: to float32, and back to the type of what it was given."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from memprof.policies.precision.autocast_lists import LASTING, is_one_of
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.source_lines import is_of_torch

if TYPE_CHECKING:
    from memprof.trace.step import Step

#: In stacks: where torch calls a module's forward.
_MODULE_CALL = ":_call_impl"


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


def calls_of_code(step: Step, ops: Ints, innermost: Ints) -> tuple[Ints, Bools]:
    """Returns the module calls whose forward casts the operands of operators, and whether a module of torch reads them.

    Such a module is called by that forward, whose variable holds the cast meanwhile and until it returns.

    Args:
        step: The step.
        ops: The operators.
        innermost: The innermost module call of each of the step's operators, NONE outside, ``(ops,)``.

    Returns:
        Rows of module calls, NONE for none, and whether a module is given the cast; both as long as ``ops``.
    """
    stacks, calls = step.stacks, innermost[ops]
    within = {
        number: sum(_MODULE_CALL in frame for frame in takewhile(is_of_torch, frames.splitlines()))
        for number, frames in zip(stacks.stack_id.tolist(), map(str, stacks.frames.tolist()), strict=True)
        if number in step.own_float32 or number in step.own_weight_type
    }
    depth = np.array([within.get(number, 0) for number in step.ops.stack_id[ops].tolist()], dtype=np.int64)
    is_given = depth > 0
    for above in range(int(depth.max(initial=0))):
        goes_up = (depth > above) & (calls != NONE)
        calls = np.where(goes_up, step.module_calls.parent_call_id[calls], calls)
    return calls, is_given


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
    count = -1
    while np.count_nonzero(was_short) != count:
        count = np.count_nonzero(was_short)
        was_short[op[was_short[maker]]] = True
    back = is_made & was_short[made_by]
    back[back] = np.isin(step.ops.stack_id[made_by[back]], list(step.casts_back))
    return back
