"""Estimates the duration of operators that were never run: the larger of their compute time and their memory time.

Source: S. Williams, A. Waterman, D. Patterson, 2009, Roofline: an insightful visual performance model. Applied here to
each operator separately; bytes are those of its tensors, and all arithmetic runs at the matrix product rate of fp32
or bf16, by the type of the result.
"""

from __future__ import annotations

import numpy as np

from memprof.trace.assemble.memory.native_events import CPU
from memprof.trace.assemble.recording import Recording
from memprof.trace.files.spool import FLAG_VIEW
from memprof.trace.largest_written import largest_written
from memprof.trace.manifest import Speed
from memprof.trace.schema import Bools, Floats, Ops, Steps, Storages, Uses

_HALF = ("bfloat16", "float16")
#: Operators that move nothing: they allocate memory without writing to it, or are views by another name.
_MOVES_NOTHING = (
    *(
        "aten.empty.memory_format",
        "aten.empty_like.default",
        "aten.empty_strided.default",
        "aten.empty_permuted.default",
    ),
    *("aten.new_empty.default", "aten.new_empty_strided.default", "aten._unsafe_view.default"),
)


def roofline(recording: Recording, ops: Ops, storages: Storages, uses: Uses, speed: Speed) -> tuple[Floats, str]:
    """Returns a lower bound on each row's duration (microseconds, NaN between operators), and its source.

    Args:
        recording: The raw recording of a dry run.
        ops: Its operators, with their FLOPs and bytes.
        storages: What they use.
        uses: How they use it.
        speed: Speed of the machine; durations are 0 where it is unknown.
    """
    if not speed.memory_bytes_per_us or not speed.fp32_flops_per_us:
        return np.where(recording.is_real, 0.0, np.nan), "none: nothing was computed, and the machine was not measured"
    is_view = recording.spread((recording.raw["flags"] & FLAG_VIEW) != 0, fill=False)
    moves = ~is_view & ~np.isin(ops.name.astype(str), _MOVES_NOTHING)
    moved = np.where(moves, ops.read_bytes + ops.written_bytes, 0)
    rate = np.where(_is_half(ops, storages, uses), speed.bf16_flops_per_us, speed.fp32_flops_per_us)
    least_us = np.maximum(moved / speed.memory_bytes_per_us, ops.flops / np.maximum(rate, speed.fp32_flops_per_us))
    speeds = "this machine's measured speeds" if recording.memory_events.device == CPU else "the data sheet's speeds"
    source = f"roofline: a lower bound from operations, bytes and {speeds}; nothing was computed"
    return np.where(recording.is_real, least_us, np.nan), source


def _is_half(ops: Ops, storages: Storages, uses: Uses) -> Bools:
    """Returns which operators have a 16-bit tensor as their largest result, or write to one. Shape (ops,)."""
    is_half = np.append(np.isin(storages.dtype.astype(str), _HALF), False)  # the last stands for NONE
    found: Bools = is_half[largest_written(ops, storages, uses)]
    return found


def with_roofline(steps: Steps, ops: Ops) -> Steps:
    """Returns the steps of a dry run, each as long as the sum of its operators."""
    own_us = np.where(np.isnan(ops.duration_us), 0.0, ops.duration_us)
    per_step = np.array([own_us[ops.step == step].sum() for step in steps.step.tolist()], dtype=np.float64)
    return steps.replace(duration_us=per_step)
