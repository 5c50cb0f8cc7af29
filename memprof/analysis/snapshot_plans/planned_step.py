"""The step of an imported snapshot to plan for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.analysis.out_of_memory.post_mortem import failing_step
from memprof.analysis.snapshot_plans.change import with_block
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE, OutOfMemory
from memprof.trace.step import Step
from memprof.trace.store import Trace
from memprof.trace.whole_steps import has_whole_step
from memprof.units import format_bytes


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """The step of a snapshot to plan for.

    Attributes:
        step: The step; of one in which memory ran out, with the failed request at its end.
        remark: Why its peak may not be that of the job; "" if it may.
    """

    step: Step
    remark: str = ""


def step_to_plan(trace: Trace, number: int | None = None) -> PlannedStep:
    """Returns the fullest complete step of a snapshot, or the part of one up to a failed request if that is fuller.

    Args:
        trace: The recording.
        number: Number of the step; None for the fullest.

    Raises:
        BadInputError: The trace contains no operators, or is damaged.
        UsageError: There is no such step.
    """
    if number is not None:
        return PlannedStep(trace.step(number))
    whole = trace.fullest_step(is_whole=True) if has_whole_step(trace) else None
    failed = _failed_step(trace)
    if failed is not None and (whole is None or _peak_bytes(failed.step) > _peak_bytes(whole)):
        return failed
    if whole is not None:
        return PlannedStep(whole)
    return PlannedStep(trace.fullest_step(), "the step is incomplete: the whole may need more.")


def _failed_step(trace: Trace) -> PlannedStep | None:
    """Returns the step of the last request that failed, which counts as made; None without any."""
    failures = trace.table(OutOfMemory)
    for row in reversed(np.flatnonzero(~failures.is_caught).tolist()):
        found, size = failing_step(trace, failures, row), int(failures.requested_bytes[row])
        if found is None or size <= 0:
            continue
        step, op = found
        category = "activation" if step.ops.phase[op] == "forward" else "temporary"
        remark = (
            f"memory ran out: the request of {format_bytes(size)} that failed counts as made, and what the step would "
            "have needed after it is unknown."
        )
        return PlannedStep(with_block(step, category, str(failures.device[row]), size, op, NONE), remark)
    return None


def _peak_bytes(step: Step) -> int:
    return int(live_bytes(step).during.max(initial=0))
