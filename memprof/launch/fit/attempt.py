"""The measured memory and time of a run of the job, unmodified or under a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memprof.policies.plan.plan import Plan
from memprof.trace.store import Trace
from memprof.trace.whole_steps import has_untouched_step, require_whole_step

#: Outcomes of a run under a plan: within the budget, above it, the plan did not fit the job, the job failed under it,
#: or skipped because its dry run was above the budget.
OUTCOMES = ("fits", "above", "refused", "failed", "passed over")


@dataclass(frozen=True)
class Measured:
    """The measurements of a recorded run.

    Attributes:
        peak_bytes: Peak live bytes over all ranks and recorded steps.
        step_time_us: Step time in microseconds on that rank; NaN if no step ran without the recorder.
        rank: The rank with that peak.
    """

    peak_bytes: int
    step_time_us: float
    rank: int


@dataclass(frozen=True)
class Attempt:
    """A run of the job under a plan, or a dry run that made it unnecessary.

    Attributes:
        plan: The plan, with its prediction.
        outcome: One of OUTCOMES.
        measured: The measurements; None if nothing was recorded.
        reason: Why the plan or the job failed, "" if neither did.
        dry_bytes: Peak of its dry run; None if there was none.
        dry_reserved_bytes: What was reserved in it, where the budget is a device's; 0 elsewhere.
        ran_out: Whether the job failed because it ran out of memory.
    """

    plan: Plan
    outcome: str
    measured: Measured | None
    reason: str = ""
    dry_bytes: int | None = None
    dry_reserved_bytes: int = 0
    ran_out: bool = False

    @property
    def was_run(self) -> bool:
        """Whether the job ran for real."""
        return self.outcome != "passed over"


def measure(trace: Trace) -> Measured:
    """Returns a job's measurements from its recording.

    Raises:
        BadInputError: The recording contains no operators.
        InconclusiveError: The recording contains no complete step, so the peak may be still to come.
    """
    ranks = [trace.rank_trace(rank) for rank in trace.ranks]
    peaks = [max(rank.step_peaks().values(), default=0) for rank in ranks]
    fullest = ranks[peaks.index(max(peaks))]
    require_whole_step(fullest)
    step = fullest.fullest_step()
    time_us = step.duration_us if has_untouched_step(fullest) else math.nan
    return Measured(peak_bytes=max(peaks), step_time_us=time_us, rank=fullest.rank)
