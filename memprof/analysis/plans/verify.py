"""Compares a prediction with a measured run: by counter, phase and category, and the place of each peak."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from memprof.analysis.diff.budget import BudgetVerdict, has_measured_step, judge_budget, why_unmeasured
from memprof.analysis.plans.another_size import basis_at
from memprof.analysis.plans.frames import find_alike
from memprof.analysis.plans.predict import Side, forecast, side_of
from memprof.errors import InconclusiveError, UsageError
from memprof.json_values import LEFT_OUT
from memprof.machines.catalogue import machine_of_device
from memprof.phases import in_order
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_tables import plan_to_tables, policy_tables
from memprof.policies.plan.prediction import Prediction, model_of
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.manifest import PREDICTED, Manifest
from memprof.trace.schema import CATEGORIES
from memprof.trace.store import Trace
from memprof.trace.whole_steps import has_untouched_step
from memprof.units import format_bytes, format_percent, format_us, format_us_between


@dataclass(frozen=True)
class Figures:
    """The figures of one step that are compared.

    Attributes:
        peak_allocated_bytes: Its peak.
        peak_phase: The phase of the peak.
        peak_place: What runs at the peak, in words.
        step_time_us: Step time, NaN where no step ran without the recorder.
        phases: Peak of each phase.
        categories: Bytes at the peak, by category.
    """

    peak_allocated_bytes: int
    peak_phase: str
    peak_place: str
    step_time_us: float
    phases: dict[str, int] = field(metadata=LEFT_OUT)
    categories: dict[str, int] = field(metadata=LEFT_OUT)


@dataclass(frozen=True)
class Compared:
    """One number, predicted and measured."""

    name: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error_bytes(self) -> int:
        """Predicted minus measured."""
        return self.predicted_bytes - self.measured_bytes


@dataclass(frozen=True)
class Verification:
    """A prediction and the run it was made for.

    Attributes:
        plan: The plan.
        predicted: The predicted figures.
        measured: The measured figures.
        phases: Peak of each phase.
        categories: Bytes at each side's own peak.
        warnings: Caveats on the figures.
        manifest: The manifest of the run's recording.
        budget: The run compared with the plan's budget; None where it has none.
        unlike: Why no step of the run is comparable with the prediction, a clause; "" where one is.
    """

    plan: Plan
    predicted: Figures
    measured: Figures
    phases: tuple[Compared, ...]
    categories: tuple[Compared, ...]
    warnings: tuple[str, ...]
    manifest: Manifest
    budget: BudgetVerdict | None = None
    unlike: str = ""

    @property
    def exit_code(self) -> int:
        """The exit code of `memprof verify`."""
        if self.budget is not None and self.budget.fits is not True:
            return self.budget.exit_code
        return InconclusiveError.exit_code if self.unlike else 0

    @property
    def peak_error_bytes(self) -> int:
        """Predicted minus measured peak."""
        return self.predicted.peak_allocated_bytes - self.measured.peak_allocated_bytes

    @property
    def peak_error_ratio(self) -> float:
        """The error as a share of the measured peak; NaN where that is 0."""
        return _ratio(self.peak_error_bytes, self.measured.peak_allocated_bytes)

    @property
    def time_error_ratio(self) -> float:
        """Predicted minus measured step time, as a share of the measured; NaN where one is unknown."""
        return _ratio(self.predicted.step_time_us - self.measured.step_time_us, self.measured.step_time_us)


def verify_plan(plan: Plan, measured: Trace, recorded: Trace | None = None) -> Verification:
    """Compares a plan's prediction with a run under the plan, on steps with the same shapes.

    Args:
        plan: The plan.
        measured: The run under the plan.
        recorded: The recording to predict from again; where left out, the plan's own prediction is used.

    Raises:
        BadInputError: A trace contains no operators, or is damaged.
        InconclusiveError: The run is of another model than the plan's, or only its warm-up was recorded.
        PolicyError: A policy does not apply to the recording.
        UsageError: The plan contains no prediction, and no recording is given to make one from.
    """
    if not has_measured_step(measured):
        # The first steps allocate the optimizer state, and an incomplete step may end below its peak.
        raise InconclusiveError(f"{measured.path} cannot verify the plan's prediction: {why_unmeasured(measured)}.")
    if recorded is not None:
        made = forecast(recorded, plan, basis_at(recorded, plan))
        prediction = made.plan.prediction
        predicted = _figures(made.predicted)
    elif plan.prediction is not None:
        prediction = plan.prediction
        predicted = _predicted(prediction)
    else:
        raise UsageError(
            "the plan contains no prediction. Add the recording to predict from, memprof verify PLAN RUN HEAD, or "
            "write one into the plan: memprof predict RUN --plan PLAN --write PLAN"
        )
    assert prediction is not None
    alike = find_alike(measured, prediction, plan)
    step = alike.step
    model = model_of(step)[0]
    if prediction.model and model and prediction.model != model:
        raise InconclusiveError(
            f"not comparable: the plan was made for {prediction.model}, but {measured.path} is a run of {model}."
        )
    figures = replace(_figures(side_of(step)), phases=alike.phases)
    if _is_for_another_machine(prediction, measured.manifest):
        predicted = replace(predicted, step_time_us=math.nan)
    if not has_untouched_step(measured):
        # Measured times include the recorder's overhead, which would count against the prediction.
        figures = replace(figures, step_time_us=math.nan)
    return Verification(
        plan=plan,
        predicted=predicted,
        measured=figures,
        phases=_compared(predicted.phases, figures.phases, tuple(in_order((*predicted.phases, *figures.phases)))),
        categories=_compared(predicted.categories, figures.categories, CATEGORIES),
        warnings=(*_warnings(plan, prediction, measured, recorded), *alike.warnings),
        manifest=measured.manifest,
        budget=None if plan.budget_bytes is None else judge_budget(measured, plan.budget_bytes),
        unlike=alike.unlike,
    )


def describe_short(found: Verification) -> str:
    """Returns a sentence on the accuracy of a prediction, or saying that no step is comparable."""
    if found.unlike:
        return f"the prediction cannot be compared: {found.unlike}."
    predicted, measured = found.predicted, found.measured
    error = abs(found.peak_error_bytes)
    share = f" ({format_percent(abs(found.peak_error_ratio))})" if error and measured.peak_allocated_bytes else ""
    off = f"{format_bytes(error)} too {'high' if found.peak_error_bytes > 0 else 'low'}{share}" if error else "exact"
    sentence = (
        f"predicted peak {format_bytes(predicted.peak_allocated_bytes)}, "
        f"measured {format_bytes(measured.peak_allocated_bytes)}: {off}"
    )
    if predicted.peak_phase != measured.peak_phase:
        sentence += f"; it is in {measured.peak_phase}, not in {predicted.peak_phase}"
    if math.isfinite(found.time_error_ratio):
        sentence += (
            f". Step time predicted {format_us(predicted.step_time_us)}, measured {format_us(measured.step_time_us)}"
            f" ({found.time_error_ratio:+.1%})".replace("%", " %")
        )
        times = found.plan.time_interval
        if times is not None:
            is_inside = times.least_us <= measured.step_time_us <= times.most_us
            bounds = format_us_between(times.least_us, times.most_us)
            sentence += f", {'within' if is_inside else 'outside'} the expected {bounds}"
    return f"{sentence}."


def _figures(side: Side) -> Figures:
    return Figures(
        peak_allocated_bytes=side.peak.allocated_bytes,
        peak_phase=side.peak.phase,
        peak_place=side.peak.describe(),
        step_time_us=side.step_time_us,
        phases={phase: moment.allocated_bytes for phase, moment in side.phases.items()},
        categories=side.categories,
    )


def _predicted(prediction: Prediction) -> Figures:
    module = f" of {prediction.peak_module}" if prediction.peak_module else ""
    return Figures(
        peak_allocated_bytes=prediction.peak_allocated_bytes,
        peak_phase=prediction.peak_phase,
        peak_place=f"{prediction.peak_phase}{module}",
        step_time_us=prediction.step_time_us,
        phases=prediction.phases,
        categories=prediction.categories,
    )


def _compared(predicted: dict[str, int], measured: dict[str, int], order: tuple[str, ...]) -> tuple[Compared, ...]:
    names = [*order, *sorted({*predicted, *measured} - set(order))]
    rows = (Compared(name, predicted.get(name, 0), measured.get(name, 0)) for name in names)
    return tuple(row for row in rows if row.predicted_bytes or row.measured_bytes)


def _warnings(plan: Plan, prediction: Prediction, measured: Trace, recorded: Trace | None) -> list[str]:
    manifest = measured.manifest
    warnings = []
    if manifest.backend.name == PREDICTED:
        warnings.append(f"{measured.path} is itself a prediction, not a run.")
    elif manifest.plan is None:
        warnings.append(f"{measured.path} was recorded without a plan: memprof record --plan PLAN script.py")
    elif policy_tables(manifest.plan) != plan_to_tables(Plan(plan.policies)):
        warnings.append(f"{measured.path} was recorded under another plan.")
    if not manifest.capture.is_complete:
        warnings.append(f"{measured.path} is incomplete: {manifest.capture.reason or 'the recording ended early'}.")
    if manifest.backend.name == DRY_RUN:
        warnings.append(f"{measured.path} is a dry run: its memory is exact, its step time was not measured.")
    elif not has_untouched_step(measured):
        warnings.append(
            f"{measured.path} has no step without the recorder, so step time was not measured: let the job run two "
            "steps longer than the window."
        )
    if _is_for_another_machine(prediction, manifest):
        warnings.append(
            f"step times are not compared: predicted for {prediction.machine}, but {measured.path} ran on "
            f"{manifest.machine.device_name}."
        )
    if recorded is not None:
        warnings += [
            f"{what} differs: {before} in {recorded.path}, {after} in {measured.path}."
            for what, before, after in _differences(recorded.manifest, manifest)
        ]
    return warnings


def _is_for_another_machine(prediction: Prediction, manifest: Manifest) -> bool:
    known = machine_of_device(manifest.machine.device_name)
    return bool(prediction.machine) and (known is None or known.name != prediction.machine)


def _differences(before: Manifest, after: Manifest) -> list[tuple[str, str, str]]:
    pairs = [
        ("device", before.machine.device_name, after.machine.device_name),
        ("torch", before.torch_version, after.torch_version),
        ("world size", str(before.world_size), str(after.world_size)),
    ]
    return [pair for pair in pairs if pair[1] != pair[2]]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
