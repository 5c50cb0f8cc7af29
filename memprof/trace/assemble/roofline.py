"""Estimates what operators that nobody ran would take: as long as the slower of their arithmetic and their memory.

Source: S. Williams, A. Waterman, D. Patterson, 2009, Roofline: an insightful visual performance model. Here every
operator by itself; bytes are those of its tensors, and all arithmetic runs at the rate of fp32 products.
"""

from __future__ import annotations

import numpy as np

from memprof.trace.assemble.recording import Recording
from memprof.trace.manifest import Speed
from memprof.trace.schema import Floats, Ops, Steps
from memprof.trace.spool import FLAG_VIEW


def roofline(recording: Recording, ops: Ops, speed: Speed) -> tuple[Floats, str]:
    """Returns what each row would take at least (microseconds, NaN between operators), and how that is known.

    Args:
        recording: The raw recording, of a dry run.
        ops: Its operators, with their operations and bytes.
        speed: How fast the machine is; operators take no time where that is not known.
    """
    if not speed.memory_bytes_per_us or not speed.fp32_flops_per_us:
        return np.where(recording.is_real, 0.0, np.nan), "none: nothing was computed, and the machine was not measured"
    is_view = recording.spread((recording.raw["flags"] & FLAG_VIEW) != 0, fill=False)
    moved = np.where(is_view, 0, ops.read_bytes + ops.written_bytes)
    least_us = np.maximum(moved / speed.memory_bytes_per_us, ops.flops / speed.fp32_flops_per_us)
    source = "roofline: a lower bound from operations, bytes and this machine's measured speeds; nothing was computed"
    return np.where(recording.is_real, least_us, np.nan), source


def with_roofline(steps: Steps, ops: Ops) -> Steps:
    """Returns the steps of a dry run as long as their operators together."""
    own_us = np.where(np.isnan(ops.duration_us), 0.0, ops.duration_us)
    per_step = np.array([own_us[ops.step == step].sum() for step in steps.step.tolist()], dtype=np.float64)
    return steps.replace(duration_us=per_step)
