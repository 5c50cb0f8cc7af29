"""Steps of dry runs under torch.compile, with times at the speeds of the recording."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from memprof.analysis.plans.basis import Basis
from memprof.analysis.plans.dry_steps import as_recorded, matching_steps
from memprof.errors import PolicyError
from memprof.policies.base import Policy
from memprof.replay.scale import product_kinds
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.manifest import Manifest
from memprof.trace.schema import Floats
from memprof.trace.step import Step
from memprof.trace.store import Trace

#: The allocation of a buffer in generated code, which writes nothing.
_ALLOCATION = "aten.empty_strided.default"


def steps_of_compiled(
    basis: Basis, trace: Trace, recording: Manifest, policies: Sequence[Policy] = ()
) -> tuple[Step, ...] | None:
    """Returns the steps of a dry run under a plan that compiles, in place of those that no model predicts.

    Their sizes and lives are those of the compiler's own code. If the recording is a dry run, too, so are their times.
    Otherwise matrix products, convolutions and attention take the time of their operations at the speed that those of
    the recorded step have, fused kernels and other operators the time of their bytes. Time beyond operators shrinks
    with the number of operators, since each costs about the same there. Copies between device and host, which take no
    time in a dry run, add what is modelled for the policy alone.

    Args:
        basis: The steps as recorded.
        trace: The dry run.
        recording: The recording's manifest.
        policies: The plan that the job was dry-run under.

    Returns:
        A step for each of the basis; None if the dry run has none on the same inputs.

    Raises:
        BadInputError: The dry run recorded no operators.
        InconclusiveError: It contains no complete step.
    """
    found = matching_steps(basis, trace)
    if found is None:
        return None
    recorded = (basis.step, *basis.others)
    if recording.backend.name == DRY_RUN:
        timed = tuple(
            dataclasses.replace(as_recorded(step, before, step.ops.duration_us), duration_us=step.duration_us)
            for step, before in zip(found, recorded, strict=True)
        )
    else:
        timed = tuple(_timed(step, before) for step, before in zip(found, recorded, strict=True))
    copied_us = _copied_us(basis.step, policies)
    return tuple(dataclasses.replace(step, duration_us=step.duration_us + copied_us) for step in timed)


def _copied_us(recorded: Step, policies: Sequence[Policy]) -> float:
    """Returns the time that policies which copy between device and host add to a step, as modelled, in microseconds."""
    total = 0.0
    for policy in policies:
        if policy.takes_host:
            try:
                total += max(0.0, policy.transform(recorded).duration_us - recorded.duration_us)
            except PolicyError:  # applied to compiled code alone
                continue
    return total


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
    ops, rates = recorded.ops, recorded.product_flops_per_us
    times = np.nan_to_num(ops.duration_us)
    products = ops.flops > 0
    work, moved = _work(step, rates), step.ops.read_bytes + step.ops.written_bytes
    per_work = _ratio(times[products].sum(), _work(recorded, rates)[products].sum())
    per_byte = _ratio(times[~products].sum(), (ops.read_bytes + ops.written_bytes)[~products].sum())
    is_kernel = (step.ops.written_bytes > 0) & (step.ops.name != _ALLOCATION)
    found: Floats = np.where(step.ops.flops > 0, work * per_work, np.where(is_kernel, moved * per_byte, 0.0))
    return found


def _work(step: Step, rates: tuple[float, float]) -> Floats:
    """Returns the FLOPs of each operator, those in a short type in proportion to their rates, shape ``(ops,)``."""
    ratio = rates[0] / rates[1] if all(rates) else 1.0
    found: Floats = step.ops.flops.astype(np.float64) * np.where(
        np.isin(product_kinds(step), ("bf16", "fp16")), ratio, 1.0
    )
    return found


def _count(step: Step) -> int:
    """Returns the number of operators that write memory: views cost as much, but the compiler makes none."""
    return int((step.ops.written_bytes > 0).sum())


def _ratio(time_us: float, amount: float) -> float:
    return float(time_us / amount) if amount else 0.0
