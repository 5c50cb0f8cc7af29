"""The logits of an imported step, and what the loss makes of their size."""

from __future__ import annotations

import numpy as np

from memprof.analysis.snapshot_plans.change import made_in, of_category, phase_rows
from memprof.trace.schema import NONE, Bools
from memprof.trace.step import Step

#: Allocations around the end of forward among which the loss's own are: softmax, its logarithm, their gradients.
_NEAR = 16
#: Smaller logits are not worth a change of their own.
_LEAST_BYTES = 1 << 20


def find_logits(step: Step) -> Bools:
    """Returns which storages are logits or of their size, around the end of forward; none if others are as large."""
    storages, created = step.storages, step.storages.created_op_id
    backward = phase_rows(step, "backward")
    is_last = np.zeros(len(step.ops), dtype=np.bool_)
    # Each backward begins where the row before it is not backward's.
    for begin in backward[np.append(True, np.diff(backward) > 1)[: len(backward)]].tolist():
        is_last[max(0, begin - _NEAR) : begin + _NEAR] = True
    moves = of_category(step, "activation", "temporary") & (created != NONE) & ~made_in(step, "optimizer")
    near = moves & is_last[np.maximum(created, 0)]
    size = int(storages.requested_bytes[near].max(initial=0))
    logits: Bools = near & np.isin(storages.requested_bytes, (size, size // 2))
    has_larger = int(storages.requested_bytes[moves & ~near].max(initial=0)) >= size
    if size < _LEAST_BYTES or has_larger or logits.sum() < 2:
        return np.zeros(len(storages), dtype=np.bool_)
    return logits
