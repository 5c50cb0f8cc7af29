"""The prediction of a plan, for comparison with a later run whose input shapes are the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from memprof.phases import in_order
from memprof.policies.plan.interval import Interval, TimeInterval
from memprof.policies.runtime.model_names import parameter_bytes_by_root, trained_roots
from memprof.replay.live import fullest_of, live_bytes, live_bytes_by_category, peak_op
from memprof.trace.schema import NONE
from memprof.trace.step import Step


@dataclass(frozen=True)
class Prediction:
    """Predicted figures of the steps under a plan.

    Attributes:
        trace: The recording it was made from.
        model: Type of the recorded root module, "" where there was none.
        parameter_bytes: Bytes of the recorded model's parameters.
        recorded_peak_bytes: Highest peak of the recorded steps.
        recorded_step_time_us: Duration of the step with that peak.
        peak_allocated_bytes: Highest predicted peak of the steps under the plan.
        peak_phase: Phase the peak is in.
        peak_module: Module that runs there, "" outside modules.
        step_time_us: Predicted duration of the recorded step with the highest peak.
        how: The least certain source among its policies, one of policies.base.SOURCES.
        phases: Highest bytes in each phase.
        categories: Bytes at the peak, by category.
        machine: The machine the step times are for, "" for that of the recording.
        ran_on: Inputs of the step with the highest peak under the plan (``inputs.ran_on``); "" where unknown.
        least_peak_bytes: Lower bound of the peak, from the errors of its policies on other jobs; 0 in a plan
            of an older version.
        most_peak_bytes: Upper bound, likewise.
        least_step_time_us: Lower bound of the step time, from the errors of its policies on other jobs; 0.0 where they
            are unknown.
        most_step_time_us: Upper bound, likewise.
        changes: What its policies change beyond rounding, and in the job's loop (``Plan.caveats``).
    """

    trace: str
    model: str
    parameter_bytes: int
    recorded_peak_bytes: int
    recorded_step_time_us: float
    peak_allocated_bytes: int
    peak_phase: str
    peak_module: str
    step_time_us: float
    how: str
    phases: dict[str, int] = field(default_factory=dict)
    categories: dict[str, int] = field(default_factory=dict)
    machine: str = ""
    ran_on: str = ""
    least_peak_bytes: int = 0
    most_peak_bytes: int = 0
    least_step_time_us: float = 0.0
    most_step_time_us: float = 0.0
    changes: tuple[str, ...] = ()

    @property
    def interval(self) -> Interval | None:
        """The bounds of the peak; None in a plan of an older version without them."""
        return Interval(self.least_peak_bytes, self.most_peak_bytes) if self.most_peak_bytes else None

    @property
    def time_interval(self) -> TimeInterval | None:
        """The bounds of the step time; None where they are unknown."""
        known = self.most_step_time_us > 0
        return TimeInterval(self.least_step_time_us, self.most_step_time_us) if known else None

    def with_times(self, times: TimeInterval | None) -> Prediction:
        """Returns the prediction with the bounds of its step time; None removes them."""
        least, most = (0.0, 0.0) if times is None else (times.least_us, times.most_us)
        return replace(self, least_step_time_us=least, most_step_time_us=most)

    @staticmethod
    def measured(recorded: Step, measured: Step, *, trace: str) -> Prediction:
        """Returns the figures of a recorded step and of one measured under the plan, without other steps."""
        peak = int(live_bytes(measured).during.max(initial=0))
        return Prediction.of_steps((recorded,), (measured,), Interval(peak, peak), trace=trace, how="measured")

    @staticmethod
    def of_steps(
        recorded_steps: Sequence[Step],
        predicted_steps: Sequence[Step],
        interval: Interval,
        *,
        trace: str,
        how: str,
        machine: str = "",
    ) -> Prediction:
        """Returns the figures of recorded and predicted steps; the recorded one with the highest peak comes first."""
        recorded, predicted = recorded_steps[0], fullest_of(predicted_steps)
        during = live_bytes(predicted).during
        peak = peak_op(predicted)
        module = int(predicted.ops.module_id[peak])
        model, parameter_bytes = model_of(recorded)
        return Prediction(
            trace=trace,
            model=model,
            parameter_bytes=parameter_bytes,
            recorded_peak_bytes=max(int(live_bytes(step).during.max(initial=0)) for step in recorded_steps),
            recorded_step_time_us=float(recorded.duration_us),
            peak_allocated_bytes=int(during[peak]),
            peak_phase=str(predicted.ops.phase[peak]),
            peak_module=str(predicted.modules.name[module]) if module != NONE else "",
            step_time_us=float(predicted_steps[0].duration_us),
            how=how,
            phases=phase_peaks(predicted_steps),
            categories={name: int(values[peak]) for name, values in live_bytes_by_category(predicted).items()},
            machine=machine,
            ran_on=ran_on(recorded_steps[predicted_steps.index(predicted)]),
            least_peak_bytes=interval.least_bytes,
            most_peak_bytes=interval.most_bytes,
        )


def model_of(step: Step) -> tuple[str, int]:
    """Returns the type of the trained root module with most parameters, and their bytes; "" and 0 without one.

    A loss network or a teacher that is frozen may be larger, but a job under a plan need not call it first. Where the
    step trains none, as an evaluation, all count.
    """
    roots, size = np.flatnonzero(step.modules.parent_id == NONE), parameter_bytes_by_root(step.modules)
    trained = trained_roots(step)
    largest = max(roots, key=lambda root: (bool(trained[root]), int(size[root])), default=NONE)
    return (str(step.modules.type[largest]), int(size[largest])) if largest != NONE else ("", 0)


def phase_peaks(steps: Sequence[Step]) -> dict[str, int]:
    """Returns the maximum bytes in each phase over some steps, in the order of a step."""
    peaks: dict[str, int] = {}
    for step in steps:
        during = live_bytes(step).during
        for phase in set(step.ops.phase.tolist()):
            peaks[phase] = max(peaks.get(phase, 0), int(during[step.ops.phase == phase].max()))
    return {phase: peaks[phase] for phase in in_order(peaks)}


def input_shapes(step: Step, phases: Iterable[str] = ("forward",)) -> tuple[str, ...]:
    """Returns the distinct shapes of the inputs that a step reads; of all inputs where uses were not recorded."""
    storages, uses = step.storages, step.uses
    is_input = (storages.category == "input") & (storages.shape != "")
    if len(uses):
        is_read = np.zeros(len(storages), dtype=np.bool_)
        is_read[uses.storage_id[np.isin(step.ops.phase[uses.op_id], list(phases))]] = True
        is_input &= is_read
    return tuple(sorted(set(storages.shape[is_input].tolist())))


def ran_on(step: Step) -> str:
    """Returns the inputs of a step in words: the input shapes of its model, and separately those of evaluations in it.

    Two steps that differ in this are not comparable, whatever their peaks. "" where no input was recorded.
    """
    trained, evaluated = (input_shapes(step, [phase]) for phase in ("forward", "evaluation"))
    words = [", ".join(trained)] if trained else []
    if evaluated and len(step.uses):
        words.append(f"{', '.join(evaluated)} in evaluation")
    return "; ".join(words)
