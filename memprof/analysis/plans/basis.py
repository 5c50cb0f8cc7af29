"""The steps to plan for: those of a recording, with the times of the target machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from memprof.analysis.plans.length_mix import LengthMix
from memprof.analysis.report.whole_run import refuse_light
from memprof.machines.catalogue import Accelerator, machine_of_device
from memprof.policies.allocator.policy import Allocator
from memprof.policies.base import SOURCES, Policy
from memprof.policies.plan.interval import TimeInterval, time_interval_of
from memprof.policies.plan.plan import Plan, require_predictable
from memprof.policies.plan.several_steps import DrySteps, host_bytes_under, sources_of, steps_under
from memprof.policies.swap.policy import DEFAULT_GBPS
from memprof.replay.live import distinct_steps, fullest_of, live_bytes
from memprof.replay.time import TimesElsewhere, rates_of, rates_of_recording, scale_times
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.manifest import PREDICTED
from memprof.trace.schema import Memory, Steps
from memprof.trace.step import Step
from memprof.trace.store import Trace
from memprof.trace.whole_steps import has_untouched_step, require_whole_step
from memprof.units import format_bytes

#: Limits of pinned blocks that are tried, as powers of two in MiB, and the share of rounding that is worth a word.
_MOST_MIB_POWER, _ROUNDED_SHARE = 12, 0.2

#: The first torch whose pinned memory can be had without rounding.
_FIRST_UNROUNDED = (2, 13)


@dataclass(frozen=True, eq=False)
class Basis:
    """The steps to plan for.

    Attributes:
        step: The fullest complete step, with the times of the target machine.
        machine: Name of the target machine where it differs from the recording's, "" otherwise.
        elsewhere: How its times were obtained; None where they are the recording's own.
        warnings: Caveats on those times.
        batch: The requested batch, None for the recorded one.
        length: The requested sequence length, None for the recorded one.
        mix: Results for the lengths of a data set, None where none were given.
        scaled_by: How the step at that size was obtained, one of policies.base.SOURCES; "" where it was recorded.
        others: Other steps that must fit as well: those a plan may leave fuller than ``step``.
        peaks: Recorded peak by step number; empty where a single step was requested.
        has_measured_times: Whether the recording has a step that ran without the recorder on a real device.
        reserved_bytes: The most that a device's allocator reserved while they were recorded; 0 where that is unknown.
        dry_steps: The same steps as dry-run under policies that are best not modelled, by those policies.
        known_reserved: Peak reserved bytes under plans that were asked for, by their policies.
    """

    step: Step
    machine: str = ""
    elsewhere: TimesElsewhere | None = None
    warnings: tuple[str, ...] = ()
    batch: int | None = None
    length: int | None = None
    mix: LengthMix | None = None
    scaled_by: str = ""
    others: tuple[Step, ...] = ()
    peaks: dict[int, int] = field(default_factory=dict)
    has_measured_times: bool = False
    reserved_bytes: int = 0
    dry_steps: DrySteps = field(default_factory=dict)
    known_reserved: dict[tuple[Policy, ...], int | None] = field(default_factory=dict, init=False, repr=False)
    _fullest: dict[tuple[Policy, ...], Step] = field(default_factory=dict, init=False)

    @cached_property
    def peak_bytes(self) -> int:
        """Peak allocated bytes over all the steps, as recorded."""
        return max(int(live_bytes(step).during.max(initial=0)) for step in (self.step, *self.others))

    def fullest_under(self, plan: Plan) -> Step:
        """Returns the step with the highest peak under a plan.

        Raises:
            PolicyError: A policy does not apply to the fullest step.
        """
        known = self._fullest.get(plan.policies)
        if known is None:
            require_predictable(plan.policies)
            known = fullest_of(steps_under(plan.policies, (self.step, *self.others), self.dry_steps))
            self._fullest[plan.policies] = known
        return known

    def host_bytes_under(self, plan: Plan) -> int:
        """Returns the bytes of pinned host memory that a plan's copies take.

        Raises:
            PolicyError: A policy does not apply to the fullest step.
        """
        steps = (self.step, *self.others)
        return host_bytes_under(plan.policies, lambda first: steps_under(first, steps, self.dry_steps))

    def describe_rounding(self, plan: Plan, torch_version: str = "") -> str:
        """Returns what rounding adds to a plan's pinned memory, and the option that avoids it; "" for little.

        Args:
            plan: The plan.
            torch_version: Version of torch in the job; "" where unknown.

        Raises:
            PolicyError: A policy does not apply to the fullest step.
        """
        pinned = self.host_bytes_under(plan)
        if not pinned or any(isinstance(each, Allocator) for each in plan.policies):
            return ""
        options = [Allocator(pinned_max_cached_size_mb=1 << power) for power in range(_MOST_MIB_POWER, -1, -1)]
        sizes = [self.host_bytes_under(plan.with_policies((option,))) for option in options]
        if min(sizes) > (1 - _ROUNDED_SHARE) * pinned:
            return ""
        # The largest limit with nearly all of the effect: what is below it is kept and used again.
        least = min(sizes) + (pinned - min(sizes)) // 10
        option, size = next((each, size) for each, size in zip(options, sizes, strict=True) if size <= least)
        setting = f"pinned_max_cached_size_mb:{option.pinned_max_cached_size_mb}"
        known = _numbers(torch_version)
        lacks = f" (this is {torch_version}, which has no such option)" if known and known < _FIRST_UNROUNDED else ""
        newer = "" if known >= _FIRST_UNROUNDED else f"with torch 2.13 or newer{lacks}, "
        return (
            f"the plan pins {format_bytes(pinned)} on the host, as torch rounds each copy up to a power of two; "
            f"{newer}--allocator {setting} makes it {format_bytes(size)}, but larger copies are "
            "then pinned anew each time."
        )

    def predict(self, plan: Plan, trace: str = "") -> tuple[Plan, Step]:
        """Returns a plan with its prediction over all steps, and the fullest predicted step.

        Raises:
            PolicyError: A policy does not apply to the fullest step.
        """
        at_size = replace(plan, at_batch=self.batch, at_length=self.length)
        planned, step = at_size.predict(self.step, self.others, trace=trace, dry_steps=self.dry_steps)
        assert planned.prediction is not None  # predict adds one
        times = self.time_interval(plan, planned.prediction.step_time_us)
        return replace(planned, prediction=planned.prediction.with_times(times)), step

    def time_interval(self, plan: Plan, predicted_us: float) -> TimeInterval | None:
        """Returns the bounds of a plan's step time; None where they are unknown, as on another machine or size."""
        if not self.has_measured_times or self.machine or self.scaled_by:
            return None
        return time_interval_of(plan.policies, self.step, predicted_us)

    def source_of(self, plan: Plan) -> str:
        """Returns how a plan's numbers are obtained, one of policies.base.SOURCES, with the times it starts from."""
        return max((self.source, *sources_of(plan.policies, self.dry_steps)), key=SOURCES.index)

    @property
    def at(self) -> str:
        """The requested size, such as ``length 512``; "" for the recorded one."""
        return Plan(at_batch=self.batch, at_length=self.length).at

    @property
    def source(self) -> str:
        """How the step and its times were obtained, one of policies.base.SOURCES."""
        is_scaled = self.elsewhere is not None and self.elsewhere.scaled_share > 0
        times = "modelled" if is_scaled else "replayed"
        return max(times, self.scaled_by or times, key=SOURCES.index)


def basis_of(trace: Trace, step_number: int | None = None, machine: Accelerator | None = None) -> Basis:
    """Returns the steps to plan for.

    Args:
        trace: The recording.
        step_number: The only step to plan for; None for all.
        machine: The target machine; None for the recording's own.

    Raises:
        BadInputError: The trace contains no operators, or is damaged.
        InconclusiveError: It contains no complete step, for example because memory ran out in the first.
        UsageError: There is no such step.
    """
    refuse_light(trace)
    if step_number is None:
        found = basis_of_steps(trace, machine)
    else:
        found = _basis(trace, *_with_short_types(trace, (trace.step(step_number),), machine))
    recorded_on = trace.manifest.machine
    if machine is None or machine_of_device(recorded_on.device_name) is machine:
        return found
    elsewhere = scale_times(found.step, rates_of_recording(recorded_on), rates_of(machine))
    if recorded_on.device_kind != "cpu":
        return replace(found, step=elsewhere.step, machine=machine.name, elsewhere=elsewhere)
    warning = (
        f"this job was recorded on a CPU: {machine.name} runs other kernels, whose workspaces and saved tensors "
        "differ. If possible, plan from a recording made on such a device."
    )
    return replace(found, step=elsewhere.step, machine=machine.name, elsewhere=elsewhere, warnings=(warning,))


def basis_of_steps(trace: Trace, machine: Accelerator | None = None) -> Basis:
    """Returns all steps of a recording, with their recorded times, to plan for.

    Args:
        trace: The recording.
        machine: The target machine; None for the recording's own.

    Raises:
        BadInputError: The trace contains no operators, or is damaged.
        InconclusiveError: It contains no complete step, for example because memory ran out in the first.
    """
    require_whole_step(trace)
    fullest, peaks = trace.fullest_step(is_whole=True), trace.step_peaks()
    less_full = distinct_steps(fullest, (trace.step(number) for number in peaks if number != fullest.number))
    step, *others = _with_short_types(trace, (fullest, *less_full), machine)
    return replace(_basis(trace, step), others=tuple(others), peaks=peaks)


def _with_short_types(trace: Trace, steps: Iterable[Step], machine: Accelerator | None = None) -> tuple[Step, ...]:
    """Returns steps with the short types of the target machine, or of the device they were recorded on without one."""
    recorded_on = trace.manifest.machine
    target = machine or machine_of_device(recorded_on.device_name)
    if target is None:
        return tuple(steps)
    if recorded_on.device_kind == "cpu":
        return tuple(replace(step, planned_types=target.short_types) for step in steps)
    typed = (replace(step, short_types=target.short_types) for step in steps)
    if "bfloat16" in target.short_types:
        return tuple(typed)
    # The recording's rate is that of bfloat16, which the device emulates; float16's is not known.
    return tuple(replace(step, product_flops_per_us=(step.product_flops_per_us[0], 0.0)) for step in typed)


def _basis(trace: Trace, step: Step) -> Basis:
    is_real = trace.manifest.backend.name not in (DRY_RUN, PREDICTED)
    reserved = int(trace.table(Memory).reserved_bytes.max(initial=0)) if step.is_on_device() else 0
    return Basis(step, has_measured_times=is_real and has_untouched_step(trace), reserved_bytes=reserved)


def whole_steps(trace: Trace, machine: Accelerator | None = None) -> tuple[Step, ...]:
    """Returns every complete step, with the times of a machine.

    Args:
        trace: The recording.
        machine: The target machine; None for the recording's own.

    Raises:
        BadInputError: The trace contains no operators, or is damaged.
        InconclusiveError: It contains no complete step.
    """
    refuse_light(trace)
    require_whole_step(trace)
    steps = trace.table(Steps)
    whole = set(steps.step[steps.is_complete].tolist())
    recorded = (trace.step(number) for number in trace.step_peaks() if number in whole)
    found = _with_short_types(trace, recorded, machine)
    recorded_on = trace.manifest.machine
    if machine is None or machine_of_device(recorded_on.device_name) is machine:
        return found
    rates = rates_of_recording(recorded_on), rates_of(machine)
    return tuple(scale_times(step, *rates).step for step in found)


def _numbers(torch_version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version; none where it has none."""
    found = re.match(r"(\d+)\.(\d+)", torch_version)
    return tuple(map(int, found.groups())) if found else ()


def link_of(trace: Trace, machine: Accelerator | None = None) -> float:
    """Returns the bandwidth to the swap target, in bytes per microsecond: measured, or a typical value."""
    if machine is not None and machine.host_bytes_per_us:
        return machine.host_bytes_per_us
    recorded_on = trace.manifest.machine
    if recorded_on.device_kind == "cpu" and machine is None:
        return DEFAULT_GBPS["disk"] * 1e3
    measured = min(recorded_on.speed.to_host_bytes_per_us, recorded_on.speed.from_host_bytes_per_us)
    return measured if measured and machine is None else DEFAULT_GBPS["host"] * 1e3
