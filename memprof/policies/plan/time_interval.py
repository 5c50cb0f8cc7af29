"""Bounds of a measured step time: predicted times miss measured ones by more than peaks do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from memprof.policies.base import Policy
from memprof.trace.step import Step


@dataclass(frozen=True)
class TimeInterval:
    """Bounds of a predicted step time.

    Attributes:
        least_us: The lower bound.
        most_us: The upper bound.
    """

    least_us: float
    most_us: float

    @property
    def bounds(self) -> list[float]:
        """Both ends, the lower one first."""
        return [self.least_us, self.most_us]


def time_interval_of(policies: Sequence[Policy], step: Step, predicted_us: float) -> TimeInterval | None:
    """Returns the bounds of a plan's step time on the machine of the recording.

    The policies' errors on other jobs (``Policy.time_errors_seen``) are taken as independent: over a plan, their
    squares add up.

    Args:
        policies: The plan.
        step: The recorded step.
        predicted_us: Its step time under the plan.

    Returns:
        The bounds; None if the plan has no policies, the step runs on a GPU, or a policy has no measured errors.
    """
    errors = [policy.time_errors_seen for policy in policies]
    if not errors or not math.isfinite(predicted_us) or step.targets_device():
        return None
    below = above = 0.0
    for seen in errors:
        if seen is None:
            return None
        below, above = math.hypot(below, seen[0]), math.hypot(above, seen[1])
    return TimeInterval(predicted_us * max(1 - below, 0.0), predicted_us * (1 + above))
