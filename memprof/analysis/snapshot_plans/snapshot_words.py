"""The changes to an imported snapshot in sentences and tables, for a terminal and for the dashboard."""

from __future__ import annotations

from memprof.analysis.plans.plan_rows import CHANGES, PlanRow, PolicyRow, plan_tables
from memprof.analysis.plans.suggest import describe_largest
from memprof.analysis.snapshot_plans.change import Change, SnapshotPlan, SnapshotPlans
from memprof.analysis.table import FactTable
from memprof.units import format_bytes, format_bytes_between, format_bytes_change, format_count

#: What only a recording of the job itself allows.
NEEDS = (
    "Choosing operators to keep or recompute, swapping activations, compiled plans, step times and plan files need "
    "operators, which a snapshot does not contain: record the job itself, or dry-run it without a GPU "
    "(memprof record --dry-run --device NAME train.py)."
)


def verdict(found: SnapshotPlans) -> str:
    """Returns the result: the cheapest plan that fits, or what is missing."""
    budget = format_bytes(found.budget_bytes)
    if found.recorded_fits:
        subject = "The recorded part of the step fits" if found.is_partial else "The job already fits"
        return f"{subject}: its peak of {format_bytes(found.recorded.peak_bytes)} is within {budget}."
    if found.fitting:
        best = found.fitting[0]
        return f"Within {budget}: {best.what}, peak {_peak(best)}."
    return (
        f"No change found fits {budget}: the lowest peak is {_peak(found.lowest)} with {found.lowest.what}, in "
        f"{found.lowest.phase}. Give at least {format_bytes(found.needed_bytes)}."
    )


def _peak(one: SnapshotPlan) -> str:
    """Formats a plan's peak with the bounds that such predictions have."""
    least, most = one.bounds
    return format_bytes(one.peak_bytes) if least == most else f"about {format_bytes_between(least, most)}"


def describe_recorded(found: SnapshotPlans) -> list[str]:
    """Returns the step as recorded: what fills its peak, and what is reserved."""
    recorded, held = found.recorded, describe_largest(found.recorded.categories)
    peak = f"recorded: peak {format_bytes(recorded.peak_bytes)} in {recorded.phase}, with {held} live"
    lines = [f"{peak} | {format_count(found.tried, 'plan')} replayed"]
    if recorded.reserved_bytes is not None:
        more = recorded.expandable_bytes
        expandable = "" if more is None else f", with expandable segments {format_bytes(more)}"
        lines.append(f"reserved: {format_bytes(recorded.reserved_bytes)}{expandable} (modelled)")
    return lines


def caveats(found: SnapshotPlans) -> list[str]:
    """Returns what to know of the figures."""
    approximate = (
        "approximate: categories and layers are inferred from the snapshot; each peak is that of its "
        "allocations, replayed under the plan."
    )
    return [*filter(None, [found.remark]), *([] if found.recorded_fits else [approximate])]


def tables(found: SnapshotPlans) -> list[tuple[str, FactTable, str]]:
    """Returns the tables of the plans, each with its title and a remark; none if the job fits as it is."""
    if found.recorded_fits:
        return []
    fits, over, refused = plan_tables(
        *rows_of_snapshot(found), found.refused, "the cheapest first", "each change alone, and the lowest peak"
    )
    used = {change.what: change for one in (*found.fitting, *found.others) for change in one.changes}
    return [fits, over, ("How", FactTable(CHANGES, map(_policy, used.values())), ""), refused]


def rows_of_snapshot(found: SnapshotPlans) -> tuple[list[PlanRow], list[PlanRow]]:
    """Returns the plans that fit, and those that do not."""
    fitting = [_row(one, found, number) for number, one in enumerate(found.fitting, start=1)]
    return fitting, [_row(one, found, None) for one in found.others]


def _row(one: SnapshotPlan, found: SnapshotPlans, number: int | None) -> PlanRow:
    most = one.bounds[1]
    over = max(most, one.needed_reserved) - found.budget_bytes
    return PlanRow(
        found=one,
        number=number,
        describe=one.what,
        bounds=one.bounds,
        phase=one.phase,
        module="",
        recorded_bytes=found.recorded.peak_bytes,
        how=_source(one),
        policies=list(map(_policy, one.changes)),
        reserved_bytes=one.reserved_bytes,
        expandable_bytes=one.expandable_bytes,
        over=f"{format_bytes_change(over)}{', reserved' if one.needed_reserved > most else ''}",
    )


def _policy(change: Change) -> PolicyRow:
    return PolicyRow(change.policy, None, change.what, change.numerics, _source(change), change.advice, change.assumes)


def _source(one: SnapshotPlan | Change) -> str:
    return "rule" if one.is_formula else "modelled"
