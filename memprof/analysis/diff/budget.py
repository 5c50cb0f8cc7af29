"""Whether a run stayed within its budget: the fullest recorded step of the fullest rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from memprof.analysis.report.whole_loop import describe_moments
from memprof.analysis.report.whole_run import is_light
from memprof.errors import GateFailedError, InconclusiveError
from memprof.trace.cut import cuttable_steps
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.manifest import PREDICTED
from memprof.trace.schema import StepPeaks, Steps
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_bytes_of

#: How a peak was obtained, as worded in a verdict.
_HOW = {DRY_RUN: "in a dry run", PREDICTED: "predicted"}


@dataclass(frozen=True)
class BudgetVerdict:
    """A run compared with its budget.

    Attributes:
        budget_bytes: Budget of allocated bytes.
        measured_bytes: Peak allocated bytes over all recorded steps of all ranks; None where no step has one.
        how: How the peak was obtained: measured, in a dry run, or predicted.
        step: Number of the peak's step; None likewise.
        rank: The rank with the peak; None for a single rank.
        unknown: Why a higher peak cannot be ruled out, a clause; "" where it can.
        moments: Moments of a dry run of a whole loop, and how far it was followed; "" for other recordings.
    """

    budget_bytes: int
    measured_bytes: int | None
    how: str = "measured"
    step: int | None = None
    rank: int | None = None
    unknown: str = ""
    moments: str = ""

    @property
    def excess_bytes(self) -> int:
        """Bytes over the budget; 0 where the measured peak is within it."""
        return max(0, (self.measured_bytes or 0) - self.budget_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether the run stayed within the budget; None where unknown."""
        if self.excess_bytes:
            return False
        return None if self.unknown or self.measured_bytes is None else True

    @property
    def exit_code(self) -> int:
        """Exit code for a command that fails unless the run stayed within the budget."""
        return {True: 0, False: GateFailedError.exit_code, None: InconclusiveError.exit_code}[self.fits]

    @property
    def headline(self) -> str:
        """Whether it stayed within the budget, in one clause with both figures."""
        if self.measured_bytes is None:
            return (
                f"cannot determine whether it is within the budget of {format_bytes(self.budget_bytes)}: {self.unknown}"
            )
        least = "at least " if self.unknown else ""
        figures = f"{least}{format_bytes_of(self.measured_bytes, self.budget_bytes)}"
        if self.fits is None:
            return f"cannot determine whether it is within the budget: {figures}; {self.unknown}"
        if self.fits and self.moments:
            return f"Fits: {self.moments}"
        if self.fits:
            return f"within the budget, {self.how}: {figures}"
        how = "" if self.how == "measured" else f", {self.how}"
        return f"OVER the budget by {format_bytes(self.excess_bytes)}{how}: {self.moments or figures}"

    def describe(self) -> str:
        """Returns a one-sentence description."""
        if self.fits is not False or self.moments:
            return f"{self.headline}."
        rank = "" if self.rank is None else f" {'in' if self.step is None else 'of'} rank {self.rank}"
        step = "" if self.step is None else f" in step {self.step}"
        return f"{self.headline}{step}{rank}."

    def to_json(self) -> dict[str, Any]:
        """Returns the verdict as JSON containers."""
        return {"budget_bytes": self.budget_bytes, "measured_bytes": self.measured_bytes, "fits": self.fits}


#: The same keys for a run without a budget.
NO_BUDGET: dict[str, Any] = {"budget_bytes": None, "measured_bytes": None, "fits": None}


def judge_budget(trace: Trace, budget_bytes: int) -> BudgetVerdict:
    """Compares a run with a budget.

    Raises:
        BadInputError: The trace is damaged.
    """
    ranks = [trace.rank_trace(rank) for rank in trace.ranks]
    peaks = [(fullest, rank.rank) for rank in ranks if (fullest := highest_peak(rank)) is not None]
    (most, step), rank = max(peaks, key=lambda peak: peak[0][0], default=((None, None), None))
    moments = "" if rank is None else describe_moments(trace.rank_trace(rank), budget_bytes)
    reasons = [reason for rank in ranks if (reason := _why_unknown(rank))]
    return BudgetVerdict(
        budget_bytes=budget_bytes,
        measured_bytes=most,
        how=_HOW.get(trace.manifest.backend.name, "measured"),
        step=step,
        rank=rank if len(ranks) > 1 else None,
        unknown=reasons[0] if reasons else "",
        moments=moments,
    )


def judge_planned(trace: Trace) -> BudgetVerdict | None:
    """Compares a run with the budget of the plan it was recorded under; None where it had no budget.

    Raises:
        BadInputError: The trace is damaged.
        PolicyError: Its plan is invalid in this version.
    """
    if not trace.manifest.plan:
        return None
    from memprof.policies.plan.plan_tables import plan_from_tables  # most recordings have no plan

    budget_bytes = plan_from_tables(trace.manifest.plan).budget_bytes
    return None if budget_bytes is None else judge_budget(trace, budget_bytes)


def highest_peak(trace: Trace) -> tuple[int, int] | None:
    """Returns the highest peak of any rank in any recorded step, and that step; None without operators.

    A light recording has the peak of every step of the run.
    """
    peaks = [(size, number) for number, size in trace.step_peaks().items()]
    if is_light(trace):
        whole_run = trace.table(StepPeaks)
        peaks += zip(whole_run.allocated_bytes.tolist(), whole_run.step.tolist(), strict=True)
    return max(peaks, key=lambda peak: peak[0], default=None)


def has_measured_step(trace: Trace) -> bool:
    """Whether a rank's recording contains a complete step after the warm-up."""
    steps = trace.table(Steps)
    return bool((cuttable_steps(steps) & (steps.kind == "recorded") & steps.is_complete).any())


def why_unmeasured(trace: Trace) -> str:
    """Returns a clause saying that no complete step after the warm-up was recorded, and why."""
    capture = trace.manifest.capture
    reason = "the job ended before" if capture.is_complete else capture.reason or "the recording was cut short"
    return f"no complete step after the warm-up was recorded ({reason})"


def _why_unknown(trace: Trace) -> str:
    peaks = trace.table(StepPeaks)
    if not has_measured_step(trace) and not len(peaks):
        return why_unmeasured(trace)
    if bool(np.any(peaks.how == "counted")):
        return "--light samples most steps only at module calls; record without it to measure the peak"
    return ""
