"""Messages of make_fit: on the plan it applied, and on what was measured under it."""

from __future__ import annotations

from memprof.analysis.diff.budget import BudgetVerdict
from memprof.planners.search.candidate import Candidate
from memprof.units import format_bytes

LEFT_TO_MEMPROF = "make_fit leaves the job as it is while memprof record or memprof fit runs it."

AT_WORK_ALREADY = (
    "make_fit is already active in this process. Give it several models as one torch.nn.ModuleList, and their "
    "optimizers as a list."
)


def job_fits(peak_bytes: int, budget_bytes: int, device_type: str) -> str:
    """Returns the message that the job needs no plan."""
    peak, budget = format_bytes(peak_bytes), format_bytes(budget_bytes)
    return f"make_fit: the job already fits: its peak of {peak} is within {budget}.{_what_is_watched(device_type)}"


def plan_applied(one: Candidate, budget_bytes: int, recorded_bytes: int, recorded_us: float) -> str:
    """Returns the message with a plan's predicted effect."""
    change = one.step_time_us / recorded_us - 1 if recorded_us else 0.0
    return (
        f"make_fit: applied {one.plan.describe()}; predicted peak {format_bytes(one.peak_bytes)} of "
        f"{format_bytes(budget_bytes)}, was {format_bytes(recorded_bytes)}; step time {100 * change:+.0f} %. The next "
        "steps are measured."
    )


def plan_held(measured_bytes: int, predicted_bytes: int, budget_bytes: int, device_type: str) -> str:
    """Returns the message that the job fits under the plan in force."""
    within = BudgetVerdict(budget_bytes, measured_bytes).describe()
    return (
        f"make_fit: {within} Predicted: {format_bytes(predicted_bytes)}. Recording has stopped."
        f"{_what_is_watched(device_type)}"
    )


def plan_did_not_hold(one: Candidate, measured_bytes: int, budget_bytes: int) -> str:
    """Returns the message that the job exceeds the budget under the plan in force."""
    over = BudgetVerdict(budget_bytes, measured_bytes).describe()
    return (
        f"make_fit: {over} That was under {one.plan.describe()}, predicted: {format_bytes(one.peak_bytes)}; trying "
        "another plan."
    )


def nothing_fits(budget_bytes: int, recorded_bytes: int, least: tuple[int, str], policies: tuple[str, ...]) -> str:
    """Returns the message that no plan was found.

    Args:
        budget_bytes: Maximum live bytes.
        recorded_bytes: Peak of the unmodified job.
        least: The lowest peak found, and its plan.
        policies: Names of the allowed policies.
    """
    least_bytes, plan = least
    return (
        f"make_fit found no plan within {format_bytes(budget_bytes)} and leaves the job as it is, with a peak of "
        f"{format_bytes(recorded_bytes)}: the lowest found is {format_bytes(least_bytes)} with {plan} (allowed: "
        f"{', '.join(policies)})."
    )


def later_step_took(peak_bytes: int, expected_bytes: int, budget_bytes: int) -> str:
    """Returns the message that a step's peak exceeds all earlier ones."""
    peak, expected, budget = map(format_bytes, (peak_bytes, expected_bytes, budget_bytes))
    above = "above" if peak_bytes > budget_bytes else "within"
    return (
        f"make_fit: a step took {peak}, more than the {expected} seen so far; that is {above} the budget of {budget}."
    )


def ended_early(*, has_plan: bool) -> str:
    """Returns the message that the job ended while make_fit was in progress."""
    before = "the plan in force was measured" if has_plan else "enough steps were observed to plan from"
    return f"make_fit: the job ended before {before}."


def our_fault(error: Exception) -> str:
    """Returns the message that memprof failed, and that the job continues."""
    return (
        f"make_fit leaves the job as it is: {type(error).__name__}: {error}. This is a fault of memprof, not of your "
        "job; MEMPROF_DEBUG=1 shows where it is."
    )


def _what_is_watched(device_type: str) -> str:
    if device_type == "cuda":
        return ""
    return " Later steps are not monitored: on a CPU only a recorder counts allocated bytes."
