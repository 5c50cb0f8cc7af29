"""Changes to an imported snapshot's step, with the peak that a replay found under them."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.analysis.snapshot_plans.change import Change
from memprof.policies.base import NUMERICS
from memprof.replay.live import live_bytes_by_category, peak_op
from memprof.trace.step import Step


@dataclass(frozen=True, eq=False)
class SnapshotPlan:
    """Some changes, and the step under them.

    Attributes:
        changes: The changes, in the order in which they are made.
        step: The changed step.
        peak_bytes: Its replayed peak of allocated bytes.
        reserved_bytes: Modelled peak of reserved bytes; None where it was not replayed.
        expandable_bytes: The same with expandable segments; None where they are in force or it was not replayed.
    """

    changes: tuple[Change, ...]
    step: Step
    peak_bytes: int
    reserved_bytes: int | None = None
    expandable_bytes: int | None = None

    @property
    def what(self) -> str:
        """The changes in words; ``no change`` without any."""
        return " + ".join(change.what for change in self.changes) or "no change"

    @property
    def is_formula(self) -> bool:
        """Whether sizes in it are by formula."""
        return any(change.is_formula for change in self.changes)

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and most bytes to expect of the peak, by the errors of such predictions (docs/suggest.md)."""
        below = max((change.errors[0] for change in self.changes), default=0.0)
        above = max((change.errors[1] for change in self.changes), default=0.0)
        return int(self.peak_bytes * (1 - below)), int(self.peak_bytes * (1 + above))

    def fits(self, budget_bytes: int) -> bool:
        """Returns whether its peak, with the error to expect, is within a budget."""
        return self.bounds[1] <= budget_bytes

    @property
    def needed_reserved(self) -> int:
        """Reserved bytes with expandable segments, or without where these would not help; 0 where not replayed."""
        known = [size for size in (self.reserved_bytes, self.expandable_bytes) if size is not None]
        return min(known, default=0)

    @property
    def numerics(self) -> str:
        """Its effect on the numbers the job computes, one of ``policies.base.NUMERICS``."""
        return max((change.numerics for change in self.changes), key=NUMERICS.index, default=NUMERICS[0])

    @property
    def phase(self) -> str:
        """The phase of its peak."""
        return str(self.step.ops.phase[peak_op(self.step)])

    @property
    def categories(self) -> dict[str, int]:
        """Live bytes at its peak by category, without those that have none."""
        peak = peak_op(self.step)
        found = {name: int(curve[peak]) for name, curve in live_bytes_by_category(self.step).items()}
        return {name: size for name, size in found.items() if size}


@dataclass(frozen=True, eq=False)
class SnapshotPlans:
    """The result of a search.

    Attributes:
        trace: The recording, as it was named.
        budget_bytes: The budget.
        recorded: The step as recorded.
        recorded_fits: Whether that is within the budget.
        fitting: Plans within the budget, the cheapest first; of these, none contains another.
        others: Each change alone that lowers the peak, and ``lowest``, where they do not fit.
        refused: Changes that are not possible, with the reason.
        lowest: The plan whose peak is the lowest at the upper end of its bounds.
        needed_bytes: Smallest budget that ``lowest`` fits.
        tried: Number of plans replayed.
        remark: Why the peak may not be that of the job; "" if it may.
        is_partial: Whether the step is incomplete.
    """

    trace: str
    budget_bytes: int
    recorded: SnapshotPlan
    recorded_fits: bool
    fitting: tuple[SnapshotPlan, ...]
    others: tuple[SnapshotPlan, ...]
    refused: tuple[tuple[str, str], ...]
    lowest: SnapshotPlan
    needed_bytes: int
    tried: int
    remark: str
    is_partial: bool = False
