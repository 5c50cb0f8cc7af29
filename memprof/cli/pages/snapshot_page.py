"""The output of `memprof suggest` for an imported snapshot."""

from __future__ import annotations

import shlex
from typing import Any

from memprof.analysis.allocator.uncertainty import room_of
from memprof.analysis.plans.plan_json import PLAN_SCHEMA
from memprof.analysis.plans.plan_rows import CHANGES, PLANS, REFUSED, PlanRow, PolicyRow, plan_tables
from memprof.analysis.plans.suggest import describe_largest
from memprof.analysis.snapshot_plans.change import Change, SnapshotPlan, SnapshotPlans
from memprof.analysis.snapshot_plans.change_search import search_snapshot
from memprof.analysis.snapshot_plans.planned_step import step_to_plan
from memprof.analysis.table import FactTable, records
from memprof.cli.options.suggest_options import SuggestOptions
from memprof.cli.page import Page, show
from memprof.errors import GateFailedError, UsageError
from memprof.planners.search.request import MakeSearchRequest
from memprof.replay.live import live_bytes
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_bytes_between, format_bytes_change, format_count, printable

#: What only a recording of the job itself allows.
_NEEDS = (
    "Choosing operators to keep or recompute, swapping activations, compiled plans, step times and plan files need "
    "operators, which a snapshot does not contain: record the job itself."
)


def suggest_for_snapshot(opened: Trace, search_request: MakeSearchRequest, given: SuggestOptions) -> int:
    """Prints what would make the job of an imported snapshot fit.

    Args:
        opened: The snapshot.
        search_request: Makes the search request from the peak.
        given: The options.

    Returns:
        The exit code: 4 if nothing fits.

    Raises:
        UsageError: An option needs operators.
    """
    runs = (given.target, given.check, given.compile_runs, given.cluster, *given.compiled)
    if any((given.written, given.explained, given.size.option, *runs)):
        raise UsageError(
            f"{given.trace} is imported and has no operators: suggest takes --budget, --machine, --allow, --forbid, "
            "--world-size, --step, --rank and --json for it. For plan files and other sizes, record the job itself "
            "with memprof record (or --dry-run)."
        )
    planned = step_to_plan(opened, given.step_number)
    peak = int(live_bytes(planned.step).during.max(initial=0))
    request = search_request(peak, room_of(opened, given.world_size), world_size=given.world_size)
    found = search_snapshot(
        opened,
        planned,
        request.budget_bytes,
        request.allow,
        request.forbid,
        request.world_size,
        counts_reserved=request.counts_reserved,
    )
    show(lambda page: _fill(page, found), lambda: _json(found), is_json=given.is_json)
    return 0 if found.recorded_fits or found.fitting else GateFailedError.exit_code


def _fill(page: Page, found: SnapshotPlans) -> None:
    page.say(_verdict(found), "bold")
    recorded = found.recorded
    held = describe_largest(recorded.categories)
    peak = f"recorded: peak {format_bytes(recorded.peak_bytes)} in {printable(recorded.phase)}, with {held} live"
    page.say(f"{peak} | {format_count(found.tried, 'plan')} replayed", "dim")
    if recorded.reserved_bytes is not None:
        more = recorded.expandable_bytes
        expandable = "" if more is None else f", with expandable segments {format_bytes(more)}"
        page.say(f"reserved: {format_bytes(recorded.reserved_bytes)}{expandable} (modelled)", "dim")
    if found.remark:
        page.warn(found.remark)
    if found.recorded_fits:
        return
    page.warn(
        "approximate: categories and layers are inferred from the snapshot; each peak is that of its "
        "allocations, replayed under the plan."
    )
    fits, over, refused = plan_tables(
        *_rows(found), found.refused, "the cheapest first", "each change alone, and the lowest peak"
    )
    used = {change.what: change for one in (*found.fitting, *found.others) for change in one.changes}
    how = FactTable(CHANGES, map(_policy, used.values()))
    for table in (fits, over, ("How", how, ""), refused):
        page.add_section(*table)
    page.add("")
    page.say(_NEEDS, "dim")
    page.add_next(*_next(found))


def _verdict(found: SnapshotPlans) -> str:
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


def _next(found: SnapshotPlans) -> list[tuple[str, str]]:
    if not found.fitting:
        return [(f"memprof suggest {shlex.quote(found.trace)} --budget {found.needed_bytes}", "what fits")]
    budget = f"--budget {found.budget_bytes}"
    return [
        ("memprof record --dry-run --device NAME -o run.memprof train.py", "the job's operators, without a GPU"),
        (f"memprof suggest run.memprof {budget}", "exact plans, with step times and a plan file"),
    ]


def _json(found: SnapshotPlans) -> dict[str, Any]:
    recorded = found.recorded
    is_open = not found.recorded_fits and not found.fitting
    return {
        "schema": PLAN_SCHEMA,
        "trace": found.trace,
        "step": recorded.step.number,
        "budget_bytes": found.budget_bytes,
        "recorded": {
            "peak_allocated_bytes": recorded.peak_bytes,
            "peak_phase": recorded.phase,
            "step_time_us": None,
            "peak_reserved_bytes": recorded.reserved_bytes,
            "peak_reserved_expandable_bytes": recorded.expandable_bytes,
        },
        "minimum_feasible_bytes": found.needed_bytes,
        "plans": records(PLANS, [row for rows in _rows(found) for row in rows]),
        "refused": records(REFUSED, found.refused),
        "reason": _verdict(found) if is_open else "",
        "warnings": [found.remark] if found.remark else [],
        "is_approximate": True,
        "needs": _NEEDS,
        "replayed_plans": found.tried,
    }


def _rows(found: SnapshotPlans) -> tuple[list[PlanRow], list[PlanRow]]:
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
