"""Steps of dry runs under torch.compile, with times at the speeds of the recording."""

from __future__ import annotations

import dataclasses

import numpy as np

from memprof.analysis.plans.basis import Basis
from memprof.analysis.plans.dry_steps import as_recorded, matching_steps
from memprof.trace.schema import Floats
from memprof.trace.step import Step
from memprof.trace.store import Trace


def steps_of_compiled(basis: Basis, trace: Trace) -> tuple[Step, ...] | None:
    """Returns the steps of a dry run under a plan that compiles, in place of those that no model predicts.

    Their sizes and lives are those of the compiler's own code. Matrix products, convolutions and attention take the
    time of their operations at the speed that those of the recorded step have, fused kernels and other operators the
    time of their bytes. Time beyond operators shrinks with the number of operators, since each costs about the same
    there.

    Args:
        basis: The steps as recorded.
        trace: The dry run.

    Returns:
        A step for each of the basis; None if the dry run has none on the same inputs.

    Raises:
        BadInputError: The dry run recorded no operators.
        InconclusiveError: It contains no complete step.
    """
    found = matching_steps(basis, trace)
    if found is None:
        return None
    return tuple(_timed(step, before) for step, before in zip(found, (basis.step, *basis.others), strict=True))


def _timed(step: Step, recorded: Step) -> Step:
    durations = _durations(step, recorded)
    before_us, after_us = float(np.nansum(recorded.ops.duration_us)), float(durations.sum())
    beyond_us = recorded.duration_us - before_us
    if beyond_us > 0:
        step_us = after_us + beyond_us * min(1.0, _count(step) / max(1, _count(recorded)))
    else:  # operators timed one by one take longer than the step itself
        step_us = after_us * _ratio(recorded.duration_us, before_us)
    return dataclasses.replace(as_recorded(step, recorded, durations), duration_us=step_us)


def _durations(step: Step, recorded: Step) -> Floats:
    """Returns the operators' times in microseconds, shape ``(ops,)``."""
    ops = recorded.ops
    times = np.nan_to_num(ops.duration_us)
    products = ops.flops > 0
    flops, moved = step.ops.flops, step.ops.read_bytes + step.ops.written_bytes
    per_flop = _ratio(times[products].sum(), ops.flops[products].sum())
    per_byte = _ratio(times[~products].sum(), (ops.read_bytes + ops.written_bytes)[~products].sum())
    found: Floats = np.where(flops > 0, flops * per_flop, np.where(step.ops.written_bytes > 0, moved * per_byte, 0.0))
    return found


def _count(step: Step) -> int:
    """Returns the number of operators that write memory: views cost as much, but the compiler makes none."""
    return int((step.ops.written_bytes > 0).sum())


def _ratio(time_us: float, amount: float) -> float:
    return float(time_us / amount) if amount else 0.0
