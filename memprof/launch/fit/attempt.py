"""What a run of the job was measured to need, as it is or under a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memprof.analysis.plans.basis import require_whole_step
from memprof.analysis.plans.predict import has_untouched_step
from memprof.policies.plan.plan import Plan
from memprof.trace.store import Trace

#: How a run under a plan ended: within the budget, above it, the plan did not fit the job, the job failed under it; or
#: its dry run was above the budget, so that it was not run.
OUTCOMES = ("fits", "above", "refused", "failed", "passed over")


@dataclass(frozen=True)
class Measured:
    """What a recorded run needed.

    Attributes:
        peak_bytes: Most bytes that any rank had allocated in any recorded step.
        step_time_us: Duration of a step of the rank that had; NaN where no step ran without the recorder.
        rank: That rank.
    """

    peak_bytes: int
    step_time_us: float
    rank: int


@dataclass(frozen=True)
class Attempt:
    """A run of the job under a plan, or a dry run that spared it.

    Attributes:
        plan: The plan, with its prediction.
        outcome: One of OUTCOMES.
        measured: What the run needed, None where nothing was recorded of it.
        reason: Why the plan or the job did not go on, "" where they did.
        dry_bytes: Peak of its dry run, None where there was none.
        ran_out: Whether the job failed because memory ran out.
    """

    plan: Plan
    outcome: str
    measured: Measured | None
    reason: str = ""
    dry_bytes: int | None = None
    ran_out: bool = False

    @property
    def was_run(self) -> bool:
        """Whether the job was really run."""
        return self.outcome != "passed over"


def measure(trace: Trace) -> Measured:
    """Reads off a recording what the job needed.

    Raises:
        BadInputError: It holds no operators.
        InconclusiveError: No step was recorded to its end: a peak may be still to come.
    """
    ranks = [trace.rank_trace(rank) for rank in trace.ranks]
    peaks = [max(rank.step_peaks().values(), default=0) for rank in ranks]
    fullest = ranks[peaks.index(max(peaks))]
    require_whole_step(fullest)
    step = fullest.fullest_step()
    time_us = step.duration_us if has_untouched_step(fullest) else math.nan
    return Measured(peak_bytes=max(peaks), step_time_us=time_us, rank=fullest.rank)
