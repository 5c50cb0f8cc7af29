"""Messages of `memprof fit` on the runs under plans, and on why no plan was kept."""

from __future__ import annotations

from memprof.analysis.diff.budget import BudgetVerdict
from memprof.analysis.plans.dry_check_results import Checked, describe_difference
from memprof.analysis.plans.suggest import Suggestion, describe_least
from memprof.launch.fit.request import Attempt, FitResult
from memprof.launch.outcome.verdict import describe_status
from memprof.launch.parent.recorded_job import Recorded
from memprof.planners.search.candidate import Candidate
from memprof.policies.plan.plan import Plan
from memprof.units import format_bytes

INTERRUPTED = "It was interrupted before any plan was verified, so none was written."


def describe_failure_as_it_is(done: Recorded) -> str:
    """Returns the message that the job failed by itself, and how much was recorded."""
    recording = f" {done.verdict.sentence}" if done.output.is_file() else ""
    return f"The job failed by itself, without any plan: {describe_status(done.returncode)}.{recording}"


def describe_failure_under_plan(done: Recorded) -> str:
    """Returns the message that the job failed under a plan, or that nothing was recorded."""
    if not done.returncode:
        return done.verdict.sentence
    if done.verdict.post_mortem:
        return f"the job ran out of memory under it: {describe_status(done.returncode)}."
    return f"the job failed under it, and does not without it: {describe_status(done.returncode)}."


def announce(plan: Plan, one: Candidate) -> str:
    """Returns the message that a plan is being tried."""
    return f"trying {plan.describe()}, predicted peak {format_bytes(one.peak_bytes)}"


def describe_dry_baseline(done: Recorded) -> str:
    """Returns the message that a dry run replaces the recording of a job that ran out of memory."""
    return f"the job ran out of memory, {describe_status(done.returncode)}: its dry run is the baseline"


def describe_dry_fit(found: FitResult) -> str:
    """Returns the message that a job ran out of memory although its dry run is within the budget."""
    peak = format_bytes(0 if found.recorded is None else found.recorded.peak_bytes)
    return (
        f"The job ran out of memory by itself, though its dry run peaks at {peak}, within the budget: set a "
        "budget that matches the memory available."
    )


def describe_dry_run(checked: Checked) -> str:
    """Returns the result of a dry run under a plan, compared with the prediction and the budget."""
    peak = checked.dry_bytes or 0
    reserved = f", {format_bytes(checked.reserved_bytes)} reserved" if checked.reserved_bytes else ""
    end = "within the budget" if checked.fits else "above the budget, skipped"
    return f"dry run: peak {format_bytes(peak)} ({describe_difference(peak, checked.predicted_bytes)}){reserved}, {end}"


def describe_attempt(attempt: Attempt) -> str:
    """Returns the result of a run under a plan."""
    if attempt.measured is None:
        return f"{attempt.outcome}: {attempt.reason}"
    if attempt.plan.budget_bytes is None:
        return f"measured peak {format_bytes(attempt.measured.peak_bytes)}"
    return BudgetVerdict(attempt.plan.budget_bytes, attempt.measured.peak_bytes).describe()


def why_none(found: FitResult, first: Suggestion) -> str:
    """Returns why no plan was kept: the closest candidate, and what would help."""
    if not found.attempts:
        return describe_least(first)
    budget = format_bytes(found.budget_bytes)
    measured = [(one.measured.peak_bytes, one.plan.describe()) for one in found.attempts if one.measured is not None]
    count = found.runs
    if not count:
        lowest = min(found.attempts, key=lambda one: max(one.dry_bytes or 0, one.dry_reserved_bytes))
        reserved = f", in {format_bytes(lowest.dry_reserved_bytes)} reserved," if lowest.dry_reserved_bytes else ""
        return (
            f"No plan was run: of {len(found.attempts)} dry-run, none is within {budget}; the lowest peak is "
            f"{format_bytes(lowest.dry_bytes or 0)}{reserved} with {lowest.plan.describe()}. "
            "Give at least that budget, or allow more policies."
        )
    if not measured:
        tries = f"None of {count} plans tried" if count > 1 else "The plan tried"
        could = "could be applied" if count > 1 else "could not be applied"
        return (
            f"{tries} {could} to the job: {found.attempts[-1].reason} The lowest peak reached is that of the "
            f"unchanged job, {format_bytes(found.least_bytes)}."
        )
    least, plan = min(measured)
    more = (
        " Allow more runs with --attempts."
        if count == found.request.most_attempts
        else " Give at least that budget, or allow more policies."
    )
    return (
        f"No plan was verified within {budget}: of {count} tried, the lowest peak measured is {format_bytes(least)} "
        f"with {plan}.{more}"
    )
