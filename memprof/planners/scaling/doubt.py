"""The error of a step at a size that was not recorded."""

from __future__ import annotations

import dataclasses

import numpy as np

from memprof.planners.scaling.sized import MeasuredSizes, SizedStep
from memprof.replay.live import live_bytes, made_bytes
from memprof.trace.schema import Bools
from memprof.trace.step import Step

#: Largest error seen at sizes that were not recorded, as a share of what a step makes: 3.9 % of the peak of a ResNet
#: from one recording, 3.8 % of that of a U-Net whose convolutions used another algorithm there.
SEEN = 0.05

#: Below this share of the maximum made bytes, an operator cannot be the peak under any plan.
_FULL = 0.1

#: Maximum number of sizes left out in turn.
_MOST_LEFT_OUT = 5


def step_with_errors(sized: SizedStep, size: int) -> Step:
    """Returns the step at a size, with its errors, so that the bounds of a plan's peak include them.

    Raises:
        UsageError: The size is not positive.
    """
    return dataclasses.replace(sized.step_at(size), size_errors=size_errors(sized, size))


def size_errors(sized: SizedStep, size: int) -> tuple[float, float]:
    """Returns the errors of a step at a size, downwards and upwards, as shares of what it makes.

    Cross-validation: each recorded size is predicted from the others in turn, where enough are left; the largest error
    counts both ways. What no fit matches counts upwards, at its upper bound. Between and beyond the recorded sizes
    errors are at least those seen on other jobs (``SEEN``), which is all that is known of a single recorded size.
    """
    if size in sized.sizes:
        return 0.0, 0.0
    if not isinstance(sized, MeasuredSizes):
        return SEEN, SEEN
    seen = max(SEEN, left_out_error(sized))
    above = _differences(sized.learned(size), sized.learned(size, at_most=True)).max(initial=0.0)
    return seen, seen + float(above)


def left_out_error(sized: MeasuredSizes) -> float:
    """Returns the largest error of recorded sizes predicted from the others; 0 where too few would be left."""
    sizes = sized.sizes
    if len(sizes) < (4 if sized.may_be_square else 3):
        return 0.0
    chosen = np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), _MOST_LEFT_OUT)).round().astype(int))
    errors = [_differences(sized.step_at(size), sized.learned(size, without=size)) for size in np.array(sizes)[chosen]]
    return float(max(np.abs(error).max(initial=0.0) for error in errors))


def _differences(step: Step, other: Step) -> np.ndarray:
    """Returns by how much another step of the same operators takes more near its peak, as shares of what it makes."""
    during, others = live_bytes(step).during, live_bytes(other).during
    made = made_bytes(step)
    is_full: Bools = made >= max(1.0, _FULL * float(made.max(initial=0)))
    return np.asarray((others - during)[is_full] / made[is_full])
