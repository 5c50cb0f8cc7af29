"""Frames: the steps of dry runs under the policies that change which kernels run, in the time of the recording's speed.

A policy that changes when storages live is predicted on the recorded step. One that changes which kernels run is
predicted by torch itself: the job is dry-run under it, and the other policies of a plan are predicted on those steps.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from memprof.analysis.plans.basis import Basis
from memprof.analysis.plans.suggest import Suggestion
from memprof.errors import PolicyError
from memprof.planners.search.workbench import allowed_names
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.base import Policy
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.prediction import Prediction, phase_peaks, ran_on
from memprof.policies.plan.several_steps import frame_of
from memprof.policies.registry import default_policies, policy_types
from memprof.replay.live import fullest_of
from memprof.replay.time import product_kinds
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.manifest import Manifest
from memprof.trace.operator_facts import EMPTY_STRIDED
from memprof.trace.schema import NONE, Floats, Memory
from memprof.trace.step import Step
from memprof.trace.store import Trace
from memprof.trace.whole_steps import require_whole_step
from memprof.units import format_bytes

#: What operators of two runs of a job are paired by: name, phase and module.
_Kind = tuple[str, str, str]


def frames_to_dry_run(found: Suggestion, most: int) -> tuple[tuple[Policy, ...], ...]:
    """Returns the frames that a search's plans need, in the order in which they are needed.

    These are of plans that are estimated to fit, of faster ones that fit by the lower bound of their estimate, and of
    policies without an estimate.
    """
    fastest_us = min((one.step_time_us for one in found.plans), default=float("inf"))
    budget = found.answer.search_request.budget_bytes
    faster = [one for one in found.others if one.step_time_us < fastest_us and one.interval.least_bytes <= budget]
    request, unknown = found.answer.search_request, []
    allowed = allowed_names(request.allow, request.forbid, default_policies())
    for kind in policy_types():
        if kind.name in allowed and kind.changes_kernels and not kind.has_transform():
            unknown += [(policy,) for policy in kind.candidates(found.basis.step).whole_step]
    frames = (*(frame_of(one.policies) for one in (*found.plans[:most], *faster[:most])), *unknown)
    return tuple(frame for frame in dict.fromkeys(frames) if frame and frame not in found.basis.dry_steps)


def steps_of_frame(frame: Sequence[Policy], basis: Basis, trace: Trace, recording: Manifest) -> tuple[Step, ...] | None:
    """Returns the steps of a dry run under a frame.

    Their sizes and lives are the dry run's. If the recording is a dry run, too, so are their times. Otherwise an
    operator takes the time of the recorded one it stands for, scaled by its operations or bytes; others take the time
    of their operations or bytes at the speed of the recorded step. Time beyond operators grows with their number.
    Copies between device and host, which take no time in a dry run, add what is modelled for the policy alone.

    Returns:
        A step for each of the basis; None if the dry run has none on the same inputs.

    Raises:
        BadInputError: The dry run recorded no operators.
        InconclusiveError: It contains no complete step.
    """
    found = _matching_steps(frame, basis, trace)
    if found is None:
        return None
    copied_us = _copied_us(basis.step, frame)
    timed = (
        as_recorded(step, before, step.ops.duration_us, step.duration_us + copied_us)
        if recording.backend.name == DRY_RUN
        else _timed(step, before, copied_us)
        for step, before in zip(found, (basis.step, *basis.others), strict=True)
    )
    return tuple(timed)


def _matching_steps(frame: Sequence[Policy], basis: Basis, trace: Trace) -> tuple[Step, ...] | None:
    """Returns the steps of a dry run on the same inputs as those of a basis; None if one is missing."""
    require_whole_step(trace)
    recorded = (basis.step, *basis.others)
    inputs = {step: ran_on(step) for step in map(trace.step, trace.step_peaks())}
    divides = any(policy.divides_batches for policy in frame)
    numbers = {step.number for step in recorded}
    found = []
    for before in recorded:
        same = [step for step, shapes in inputs.items() if divides or shapes == ran_on(before)]
        # Recorded steps that the basis leaves out run the same operators; a dry run of other steps may have numbers
        # that stand for something else.
        close = [step for step in same if step.number == before.number or step.number not in numbers] or same
        if not close:
            return None
        found.append(fullest_of(close))
    return tuple(found)


def as_recorded(step: Step, recorded: Step, durations: Floats, duration_us: float) -> Step:
    """Returns a dry-run step with what only a recording contains, and with other times in microseconds."""
    return dataclasses.replace(
        recorded,
        duration_us=duration_us,
        modules=step.modules,
        module_calls=step.module_calls,
        stacks=step.stacks,
        ops=step.ops.replace(duration_us=durations),
        storages=step.storages,
        uses=step.uses,
        saved=step.saved,
        memory=Memory.empty(),
        first_op_id=step.first_op_id,
        storage_ids=step.storage_ids,
        trained_modules=step.trained_modules,
    )


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


def _timed(step: Step, recorded: Step, more_us: float) -> Step:
    durations = _durations(step, recorded)
    before_us, after_us = float(np.nansum(recorded.ops.duration_us)), float(durations.sum())
    beyond_us = recorded.duration_us - before_us
    if beyond_us > 0:
        step_us = after_us + beyond_us * _count(step) / max(1, _count(recorded))
    else:  # operators timed one by one take longer than the step itself
        step_us = after_us * _ratio(recorded.duration_us, before_us)
    return as_recorded(step, recorded, durations, step_us + more_us)


def _durations(step: Step, recorded: Step) -> Floats:
    """Returns the operators' times in microseconds, shape ``(ops,)``."""
    rates = recorded.product_flops_per_us
    times, before, after = np.nan_to_num(recorded.ops.duration_us), _amounts(recorded, rates), _amounts(step, rates)
    is_product, was_product = step.ops.flops > 0, recorded.ops.flops > 0
    per_work = _ratio(times[was_product].sum(), before[was_product].sum())
    per_byte = _ratio(times[~was_product].sum(), before[~was_product].sum())
    is_kernel = is_product | ((step.ops.written_bytes > 0) & (step.ops.name != EMPTY_STRIDED))
    found: Floats = np.where(is_kernel, after * np.where(is_product, per_work, per_byte), 0.0)
    pair = _pairs(step, recorded)
    is_paired = (pair != NONE) & (before[pair] > 0) & (was_product[pair] == is_product)
    share = np.divide(after, before[pair], out=np.ones(len(after)), where=is_paired)
    paired: Floats = np.where(is_paired | (pair != NONE), times[pair] * share, found)
    return paired


def _amounts(step: Step, rates: tuple[float, float]) -> Floats:
    """Returns the FLOPs of products, those in a short type in proportion to their rates, and the bytes of others.

    Returns:
        Shape ``(ops,)``.
    """
    ops = step.ops
    ratio = rates[0] / rates[1] if all(rates) else 1.0
    work = ops.flops.astype(np.float64) * np.where(np.isin(product_kinds(step), ("bf16", "fp16")), ratio, 1.0)
    found: Floats = np.where(ops.flops > 0, work, (ops.read_bytes + ops.written_bytes).astype(np.float64))
    return found


def _pairs(step: Step, recorded: Step) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns the recorded operator that each operator stands for, shape ``(ops,)``; NONE where there is none.

    Of those with the same name, phase and module, the first stands for the first, and so on; micro-batches start anew.
    """
    known: defaultdict[_Kind, list[int]] = defaultdict(list)
    for row, kind in enumerate(_kinds(recorded)):
        known[kind].append(row)
    count: Counter[_Kind] = Counter()
    found = np.full(len(step.ops), NONE, dtype=np.int64)
    for row, kind in enumerate(_kinds(step)):
        if rows := known.get(kind):
            found[row] = rows[count[kind] % len(rows)]
            count[kind] += 1
    return found


def _kinds(step: Step) -> Iterator[_Kind]:
    ops, names = step.ops, step.modules.name
    for name, phase, module_id in zip(ops.name.tolist(), ops.phase.tolist(), ops.module_id.tolist(), strict=True):
        yield name, phase, str(names[module_id]) if module_id >= 0 else ""


def _count(step: Step) -> int:
    """Returns the number of operators that write memory: views cost as much, but the compiler makes none."""
    return int((step.ops.written_bytes > 0).sum())


def _ratio(time_us: float, amount: float) -> float:
    return float(time_us / amount) if amount else 0.0


#: Number of different shapes reported.
_MOST_SIZES = 3


@dataclass(frozen=True, eq=False)
class Alike:
    """The step of a run to compare with a prediction.

    Attributes:
        step: The fullest step with the predicted shapes; the fullest of all where there is none.
        phases: Peak of each phase, over all recorded steps.
        unlike: Why no step is comparable, a clause; "" where one is.
        warnings: Caveats on the choice.
    """

    step: Step
    phases: dict[str, int]
    unlike: str = ""
    warnings: tuple[str, ...] = ()


def find_alike(measured: Trace, prediction: Prediction, plan: Plan) -> Alike:
    """Finds the step of a run to compare with a prediction.

    Where shapes are unknown on one side, or are those of the parts into which the plan splits batches, the fullest step
    is used.
    """
    peaks = measured.step_peaks()
    steps = [measured.step(number) for number in peaks]
    fullest, phases = fullest_of(steps), phase_peaks(steps)
    shapes = {step.number: ran_on(step) for step in steps}
    if not prediction.ran_on or not any(shapes.values()):
        return Alike(fullest, phases)
    same = [step for step in steps if shapes[step.number] == prediction.ran_on]
    cuts_batches = any(isinstance(policy, Accumulate) for policy in plan.policies)
    if not same and cuts_batches and _samples(prediction.ran_on) not in map(_samples, shapes.values()):
        return Alike(fullest, phases)
    if not same:
        others = list(dict.fromkeys(filter(None, shapes.values())))
        sizes_run = " or ".join(others[:_MOST_SIZES]) + (" or others" if len(others) > _MOST_SIZES else "")
        size = f" at {plan.at}" if plan.at else ""
        unlike = f"it is for a step{size} on {prediction.ran_on}, and the run's steps ran on {sizes_run}"
        return Alike(fullest, phases, unlike=unlike)
    step = fullest_of(same)
    if plan.at and not set(re.findall(r"\d+", plan.at)) <= set(re.findall(r"\d+", prediction.ran_on)):
        hidden = f"the plan is for {plan.at}, which input shapes do not show: make sure that the run uses it."
        return Alike(step, phases, warnings=(hidden,))
    if peaks[step.number] == peaks[fullest.number]:
        return Alike(step, phases)
    warning = (
        f"step {fullest.number} has a higher peak, {format_bytes(peaks[fullest.number])}, but ran on other shapes "
        f"({shapes[fullest.number]}): compared with step {step.number}, which ran on the predicted shapes."
    )
    return Alike(step, phases, warnings=(warning,))


def _samples(shapes: str) -> set[str]:
    """Returns the first dimensions of shapes in words: the samples of a batch."""
    return set(re.findall(r"(?<![\dx])\d+", shapes))
