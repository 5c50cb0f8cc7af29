"""Results of checking a predicted plan in a dry run of the job."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from memprof.analysis.table import BYTES, BYTES_CHANGE, FIGURE, NAMES, RATIO_CHANGE, TRUTH, WORDS, Column, shown
from memprof.policies.plan.plan import Plan
from memprof.units import format_bytes_change

#: Why a plan was not checked when the user stopped the checks.
INTERRUPTED = "It was interrupted."


@dataclass(frozen=True)
class Checked:
    """A predicted plan compared with a dry run of the job under it.

    Attributes:
        plan: The plan.
        predicted_bytes: Its predicted peak.
        budget_bytes: Budget of allocated bytes.
        dry_bytes: The dry run's peak; None where the plan was not dry-run.
        reason: Why it was not dry-run, a sentence; "" where it was.
        most_bytes: Upper end of the predicted interval; the predicted peak where the prediction is exact.
        reserved_bytes: What the allocator reserved in the dry run, where the budget is a device's; 0 elsewhere.
    """

    plan: Plan
    predicted_bytes: int
    budget_bytes: int
    dry_bytes: int | None
    reason: str = ""
    most_bytes: int = 0
    reserved_bytes: int = 0

    @property
    def fits(self) -> bool | None:
        """Whether the dry run stays within the budget; None without a dry run."""
        return None if self.dry_bytes is None else self.excess_bytes == 0

    @property
    def excess_bytes(self) -> int:
        """Bytes over the budget in the dry run, of tensors or of what is reserved for them; 0 within it."""
        return max(self.dry_bytes or 0, self.reserved_bytes, self.budget_bytes) - self.budget_bytes

    @property
    def is_reserved(self) -> bool:
        """Whether what the allocator reserved alone exceeds the prediction, which is expected of all plans then."""
        return (self.dry_bytes or 0) <= self.predicted_bytes < self.reserved_bytes

    @property
    def difference_bytes(self) -> int | None:
        """The dry run's peak minus the predicted one; None without a dry run."""
        return None if self.dry_bytes is None else self.dry_bytes - self.predicted_bytes

    @property
    def difference_ratio(self) -> float | None:
        """The difference as a share of the predicted peak."""
        difference = self.difference_bytes
        return difference / self.predicted_bytes if difference is not None and self.predicted_bytes else None


def confirmed(checked: tuple[Checked, ...]) -> Checked | None:
    """Returns the first plan whose dry run stays within the budget, None where none does."""
    return next((one for one in checked if one.fits), None)


def worth_keeping(checked: tuple[Checked, ...]) -> Checked | None:
    """Returns the confirmed plan, or else the first unchecked plan that fits by its upper end."""
    unchecked = next((one for one in checked if one.fits is None and one.most_bytes <= one.budget_bytes), None)
    return confirmed(checked) or unchecked


def describe_difference(dry_bytes: int, predicted_bytes: int) -> str:
    """Describes the difference between a dry run's and a predicted peak: bytes and per cent, or ``as predicted``."""
    if dry_bytes == predicted_bytes:
        return "as predicted"
    share = f", {100 * (dry_bytes / predicted_bytes - 1):+.2g} %" if predicted_bytes else ""
    return f"{dry_bytes - predicted_bytes:+,} B{share}"


def _result(one: Checked) -> str:
    if one.dry_bytes is None:
        return f"unchecked: {one.reason}"
    if one.fits:
        return "fits"
    return f"{format_bytes_change(one.excess_bytes)} over{'' if one.dry_bytes > one.budget_bytes else ', reserved'}"


#: Plans that were dry-run.
CHECKED = (
    Column("describe", "plan", NAMES, lambda one: one.plan.describe()),
    Column("predicted_peak_allocated_bytes", "predicted", BYTES, attrgetter("predicted_bytes")),
    Column("dry_run_peak_allocated_bytes", "dry run", BYTES, attrgetter("dry_bytes")),
    Column("difference_bytes", None, BYTES_CHANGE),
    Column("difference_ratio", None, RATIO_CHANGE),
    shown("error", FIGURE, lambda one: one.dry_bytes and describe_difference(one.dry_bytes, one.predicted_bytes)),
    Column("fits", None, TRUTH),
    Column("reason", None),
    shown("result", WORDS, _result),
)
