"""The step of an imported snapshot to plan for, changes to it, and plans of such changes with their replayed peaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from memprof.analysis.out_of_memory.post_mortem import failing_step
from memprof.policies.base import NUMERICS
from memprof.policies.rewrite.draft import Draft
from memprof.replay.live import live_bytes, live_bytes_by_category, peak_op, sum_during
from memprof.trace.schema import NONE, Bools, Ints, Memory, OutOfMemory, Storages
from memprof.trace.step import Step
from memprof.trace.store import Trace
from memprof.trace.whole_steps import has_whole_step
from memprof.units import format_bytes


@dataclass(frozen=True)
class Change:
    """One way to lower the peak.

    Attributes:
        policy: Name of the policy that does it to a job.
        what: What is changed, in words.
        advice: How to apply it.
        numerics: Its effect on the numbers the job computes, one of ``policies.base.NUMERICS``.
        is_formula: Sizes are by formula, with an assumption that the snapshot does not show; else the recorded ones
            are replayed in another order.
        assumes: That assumption, as a clause; "" where there is none.
        errors: Largest errors of predicted peaks on dry runs, as shares: how far the measured peak was below and above.
        frees_gradients: Gradients do not last until the update.
        transform: Returns the step under the change; raises PolicyError where the snapshot does not allow it.
    """

    policy: str
    what: str
    advice: str
    numerics: str
    transform: Callable[[Step], Step]
    is_formula: bool = False
    assumes: str = ""
    errors: tuple[float, float] = (0.0, 0.0)
    frees_gradients: bool = False


def of_category(step: Step, *categories: str) -> Bools:
    """Returns which storages are of some categories, shape ``(storages,)``."""
    found: Bools = np.isin(step.storages.category, categories)
    return found


def phase_rows(step: Step, phase: str) -> Ints:
    """Returns the operators of a phase, in order."""
    return np.flatnonzero(step.ops.phase == phase)


def made_in(step: Step, phase: str) -> Bools:
    """Returns which storages are made in a phase of the step, shape ``(storages,)``."""
    created = step.storages.created_op_id
    found: Bools = (created != NONE) & (step.ops.phase[np.maximum(created, 0)] == phase)
    return found


def resized(step: Step, rows: Bools | Ints, sizes: Ints | int) -> Step:
    """Returns a step in which some storages have other sizes; recorded counters are dropped."""
    allocated, requested = step.storages.allocated_bytes.copy(), step.storages.requested_bytes.copy()
    allocated[rows] = requested[rows] = sizes
    storages = step.storages.replace(allocated_bytes=allocated, requested_bytes=requested)
    return replace(step, storages=storages, memory=Memory.empty())


def divided(step: Step, rows: Bools, parts: int) -> Step:
    """Returns a step in which some storages are a part of their size, rounded up."""
    return resized(step, rows, -(-step.storages.allocated_bytes[rows] // parts))


def with_block(step: Step, category: str, device: str, size_bytes: int, created: int, freed: int) -> Step:
    """Returns a step with one storage more.

    Args:
        step: The step.
        category: Its category.
        device: Its device.
        size_bytes: Its size.
        created: Operator that allocates it.
        freed: Operator after which it is freed; NONE to keep it.
    """
    draft = Draft(step)
    draft.insert_storages(
        Storages.of(
            category=[category],
            device=[device],
            requested_bytes=[size_bytes],
            allocated_bytes=[size_bytes],
            created_op_id=[created],
            freed_op_id=[freed],
        )
    )
    return draft.build()


def most_at_once(step: Step, rows: Bools) -> int:
    """Returns how many of some storages are alive at once, at most."""
    if not rows.any():
        return 0
    chosen = step.storages.take(rows)
    return int(sum_during(chosen, len(step.ops), np.ones(len(chosen), dtype=np.int64)).max())


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


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """The step of a snapshot to plan for.

    Attributes:
        step: The step; of one in which memory ran out, with the failed request at its end.
        remark: Why its peak may not be that of the job; "" if it may.
    """

    step: Step
    remark: str = ""


def step_to_plan(trace: Trace, number: int | None = None) -> PlannedStep:
    """Returns the fullest complete step of a snapshot, or the part of one up to a failed request if that is fuller.

    Args:
        trace: The recording.
        number: Number of the step; None for the fullest.

    Raises:
        BadInputError: The trace contains no operators, or is damaged.
        UsageError: There is no such step.
    """
    if number is not None:
        return PlannedStep(trace.step(number))
    whole = trace.fullest_step(is_whole=True) if has_whole_step(trace) else None
    failed = _failed_step(trace)
    if failed is not None and (whole is None or _peak_bytes(failed.step) > _peak_bytes(whole)):
        return failed
    if whole is not None:
        return PlannedStep(whole)
    return PlannedStep(trace.fullest_step(), "the step is incomplete: the whole may need more.")


def _failed_step(trace: Trace) -> PlannedStep | None:
    """Returns the step of the last request that failed, which counts as made; None without any."""
    failures = trace.table(OutOfMemory)
    for row in reversed(np.flatnonzero(~failures.is_caught).tolist()):
        found, size = failing_step(trace, failures, row), int(failures.requested_bytes[row])
        if found is None or size <= 0:
            continue
        step, op = found
        category = "activation" if step.ops.phase[op] == "forward" else "temporary"
        remark = (
            f"memory ran out: the request of {format_bytes(size)} that failed counts as made, and what the step would "
            "have needed after it is unknown."
        )
        return PlannedStep(with_block(step, category, str(failures.device[row]), size, op, NONE), remark)
    return None


def _peak_bytes(step: Step) -> int:
    return int(live_bytes(step).during.max(initial=0))
