"""Rows of operators that policies insert into a step, and the names of those that several insert."""

from __future__ import annotations

from typing import Any

import numpy as np

from memprof.trace.schema import Ints, Ops
from memprof.trace.step import Step

#: Names of the copies that policies and schedules insert: to host memory or disk, back, and into 8 bits.
SWAP_OUT, SWAP_IN, COMPRESS = "memprof.swap_out", "memprof.swap_in", "memprof.compress"


def new_ops(step: Step, name: str, before: Ints, *, kind: str = "compute", **columns: Any) -> Ops:
    """Returns rows for ``Draft.insert_ops``, in the phase, micro-batch and time of the operators that they precede.

    Args:
        step: The step.
        name: The name of all of them.
        before: Operators before which they run; the number of operators for the end of the step.
        kind: Their kind.
        columns: Further columns, each of shape ``(rows,)``; the others have their missing values.
    """
    beside = np.clip(before, 0, max(len(step.ops) - 1, 0))
    return Ops.of(
        op_id=np.arange(len(before)),
        step=step.ops.step[beside],
        micro_batch=step.ops.micro_batch[beside],
        phase=step.ops.phase[beside],
        name=np.full(len(before), name),
        kind=np.full(len(before), kind),
        start_us=step.ops.start_us[beside],
        **columns,
    )
