"""Finds the step of a run that is comparable with a prediction: one with the same shapes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.prediction import Prediction, phase_peaks, ran_on
from memprof.replay.live import fullest_of
from memprof.trace.step import Step
from memprof.trace.store import Trace
from memprof.units import format_bytes

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
