"""Finds the tensors that a job's code makes in autocast's type, in forward and in the backward of its own functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.trace.schema import NONE, Bools
from memprof.trace.source_lines import function_of

if TYPE_CHECKING:
    from memprof.trace.step import Step


def made_in_autocast_type(step: Step) -> Bools:
    """Returns which float32 tensors become short under autocast since the code makes them in its type, ``(storages,)``.

    An autograd function of the job's has no stacks in its backward. What its backward makes without an operand, and as
    large as one of these tensors of its forward, is taken for the same buffer.

    Args:
        step: The step.
    """
    ops, storages, uses = step.ops, step.storages, step.uses
    created = storages.created_op_id
    is_made: Bools = (created != NONE) & (storages.dtype == "float32")
    is_made[is_made] = np.isin(ops.stack_id[created[is_made]], list(step.in_autocast_type))
    if not is_made.any():
        return is_made
    frames = dict(zip(step.stacks.stack_id.tolist(), map(str, step.stacks.frames.tolist()), strict=True))
    forward = np.where(ops.phase == "backward", ops.forward_op_id, NONE)
    has_operand = np.zeros(len(ops), dtype=np.bool_)
    has_operand[uses.op_id[uses.role != "write"]] = True
    is_repeat = (created != NONE) & (storages.dtype == "float32")
    is_repeat[is_repeat] = ((forward != NONE) & ~has_operand)[created[is_repeat]]
    made_by = {
        (_call_of(frames[int(ops.stack_id[created[one]])]), int(storages.requested_bytes[one]))
        for one in np.flatnonzero(is_made)
    }
    for one in np.flatnonzero(is_repeat).tolist():
        call = _call_of(frames.get(int(ops.stack_id[forward[created[one]]]), ""))
        is_made[one] |= (call, int(storages.requested_bytes[one])) in made_by
    return is_made


def _call_of(frames: str) -> tuple[str, str]:
    """Returns the innermost function of a stack, and what called it."""
    innermost, _, callers = frames.partition("\n")
    return function_of(innermost), callers
