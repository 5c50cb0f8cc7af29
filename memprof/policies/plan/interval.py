"""Bounds of a measured peak and step time where the prediction is not exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.base import Policy
from memprof.policies.plan.several_steps import NO_DRY_STEPS, DrySteps, split_dry_run, steps_under
from memprof.replay.live import live_bytes, made_bytes
from memprof.replay.rounding import Unsplit
from memprof.trace.schema import NONE
from memprof.trace.step import Step

#: Fraction by which jobs exceeded a policy's hard memory cap: kernel workspaces are known only afterwards.
OVER_HELD = 0.02


@dataclass(frozen=True)
class Interval:
    """Bounds of a predicted peak.

    Attributes:
        least_bytes: The lower bound.
        most_bytes: The upper bound, which has to fit the budget as long as the plan has not been run.
    """

    least_bytes: int
    most_bytes: int

    @property
    def bounds(self) -> list[int]:
        """Both ends, the lower one first."""
        return [self.least_bytes, self.most_bytes]

    @property
    def is_exact(self) -> bool:
        """Whether the peak is known to the byte."""
        return self.least_bytes == self.most_bytes


def interval_of(
    policies: Sequence[Policy],
    recorded: Sequence[Step],
    predicted: Sequence[Step],
    fullest: Sequence[Step] | None = None,
    dry_steps: DrySteps = NO_DRY_STEPS,
) -> Interval:
    """Returns the bounds of a plan's peak.

    The observed errors of each policy (``Policy.errors``) add up over a plan. They are fractions of the bytes a step
    allocates beyond those live at its start, operator by operator, so they are small where weights dominate. The
    errors of a step scaled to another size (``Step.size_errors``) are added. What a forward before the recording
    made, and the step holds without using it (the graph of an evaluation), changes under a plan in a way that the
    recording does not show: the lower bound is without it. On a device, blocks that the allocator does not split are
    larger than requested (``replay/rounding.py``), and which ones these are changes with the plan, unless all of it was
    dry-run.

    Args:
        policies: The plan.
        recorded: The steps as recorded; the first is the one that the plan was chosen on.
        predicted: The same under the plan.
        fullest: The same under worst-case assumptions for data missing from the recording, if the caller has them.
        dry_steps: Steps from dry runs, from which the predicted ones were made: what they hold has no error.
    """
    if fullest is None:
        fullest = tuple(predicted)
        if any(policy.guesses for policy in policies):
            with suppress(PolicyError):  # one does not support such assumptions
                fullest = steps_under(policies, recorded, dry_steps, at_most=True)
    modelled = split_dry_run(policies, recorded, dry_steps)[1]
    errors = [policy.errors(recorded) for policy in modelled]
    errors.append(recorded[0].size_errors)
    errors += [
        policy.errors_combined
        for policy in policies
        if modelled and any(other.handles_saved for other in policies if other is not policy)
    ]
    below, above = (sum(shares) for shares in zip(*errors, strict=True))
    least, most = _peak(predicted, -below), max(_peak(fullest, above), _peak(predicted, above))
    held = min((policy.held_bytes for policy in policies if policy.held_bytes is not None), default=None)
    if held is not None:
        # remat keeps the job below its cap, regardless of other unknowns; how far below depends on measured times.
        most = max(_peak(predicted, 0.0), min(max(most, _peak(recorded, 0.0)), int(held * (1 + OVER_HELD))))
    # A dry run of the whole plan has the blocks that the allocator gives it.
    is_modelled = bool(modelled) and recorded[0].is_on_device()
    if is_modelled and not any(policy.splits_all_blocks for policy in policies):
        below, above = _unsplit_bytes(recorded[0], predicted)
        least, most = max(0, least - below), most + above
    if any(policy.changes_forward for policy in modelled):
        least = max(0, least - max(map(_idle_bytes, predicted), default=0))
    return Interval(least, most)


def _unsplit_bytes(recorded: Step, predicted: Sequence[Step]) -> tuple[int, int]:
    """Returns by how many bytes blocks that the allocator does not split may lower, and raise, a peak."""
    unsplit = Unsplit.of(recorded)
    peak = _peak(predicted, 0.0)
    least, most = (max(bounds) for bounds in zip(*map(unsplit.bounds_of_peak, predicted), strict=True))
    return max(0, peak - least), max(0, most - peak)


def _idle_bytes(step: Step) -> int:
    """Returns the bytes that a module's forward made before the recording, and that nothing uses or frees."""
    storages = step.storages
    is_idle = (storages.created_op_id == NONE) & (storages.freed_op_id == NONE) & (storages.module_id != NONE)
    is_idle &= np.isin(storages.category, ("activation", "temporary"))
    is_idle[step.uses.storage_id] = False
    return int(storages.allocated_bytes[is_idle].sum())


def _peak(steps: Sequence[Step], share: float) -> int:
    """Returns the highest peak if every step allocates more than predicted by a fraction."""
    peaks = []
    for step in steps:
        during = live_bytes(step).during
        if share:
            during = during + share * made_bytes(step)
        peaks.append(int(np.ceil(during.max(initial=0))))
    return max(peaks, default=0)


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
