"""The output of `memprof suggest` for an imported snapshot."""

from __future__ import annotations

import json
import shlex
from typing import Any

from rich.table import Table
from rich.text import Text

from memprof.analysis.plans.plan_json import PLAN_SCHEMA
from memprof.analysis.snapshot_plans.change import SnapshotPlan, SnapshotPlans
from memprof.cli.page import Page, cell, make_table
from memprof.errors import GateFailedError
from memprof.units import format_bytes, format_bytes_between, format_count, printable

#: What only a recording of the job itself allows.
_NEEDS = (
    "Choosing operators to keep or recompute, swapping activations, compiled plans, step times and plan files need "
    "operators, which a snapshot does not contain: record the job itself."
)


def show_snapshot_plans(found: SnapshotPlans, *, is_json: bool) -> int:
    """Prints the plans for a snapshot; returns the exit code.

    Args:
        found: The result of the search.
        is_json: Print JSON instead of a page.
    """
    if is_json:
        print(json.dumps(_json(found), indent=2, allow_nan=False))
    else:
        page = Page.for_stdout()
        _fill(page, found)
        page.write()
    return 0 if found.recorded_fits or found.fitting else GateFailedError.exit_code


def _fill(page: Page, found: SnapshotPlans) -> None:
    page.add(Text(printable(_verdict(found)), style="bold"))
    recorded = found.recorded
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in _largest(recorded.categories))
    peak = f"recorded: peak {format_bytes(recorded.peak_bytes)} in {printable(recorded.phase)}, with {held} live"
    page.add(Text(f"{peak} | {format_count(found.tried, 'plan')} replayed", style="dim"))
    if recorded.reserved_bytes is not None:
        expandable = (
            ""
            if recorded.expandable_bytes is None
            else (f", with expandable segments {format_bytes(recorded.expandable_bytes)}")
        )
        page.add(Text(f"reserved: {format_bytes(recorded.reserved_bytes)}{expandable} (modelled)", style="dim"))
    if found.remark:
        page.add(Text(f"warning: {found.remark}", style="yellow"))
    if found.recorded_fits:
        return
    page.add(
        Text(
            "warning: approximate: categories and layers are inferred from the snapshot; each peak is that of its "
            "allocations, replayed under the plan.",
            style="yellow",
        )
    )
    page.add_section("Plans that fit", _table(found.fitting, has_reserved=True), "the cheapest first")
    page.add_section("Over budget", _table(found.others), "each change alone, and the lowest peak")
    advice = make_table("change", "how", "assumes")
    used = {change.what: change for one in (*found.fitting, *found.others) for change in one.changes}
    for change in used.values():
        advice.add_row(cell(change.what), printable(change.advice), printable(change.assumes))
    page.add_section("How", advice)
    refused = make_table("change", "why")
    for what, reason in found.refused:
        refused.add_row(cell(what), printable(reason))
    page.add_section("Not possible here", refused)
    page.add("")
    page.add(Text(_NEEDS, style="dim"))
    for command, reason in _next(found):
        page.add(Text.assemble(("next: ", "dim"), printable(command), (f"  {reason}", "dim")))


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


def _table(plans: tuple[SnapshotPlan, ...], *, has_reserved: bool = False) -> Table:
    more = (">reserved", ">expandable") if has_reserved else ()
    table = make_table("plan", ">peak", ">expect", *more, "in", "sizes", "numbers")
    for one in plans:
        sizes = (one.reserved_bytes, one.expandable_bytes) if has_reserved else ()
        table.add_row(
            cell(one.what),
            format_bytes(one.peak_bytes),
            format_bytes_between(*one.bounds),
            *("" if size is None else format_bytes(size) for size in sizes),
            cell(one.phase),
            "by formula" if one.is_formula else "replayed",
            {"none": "the same", "rounding": "rounding"}.get(one.numerics, "approximate"),
        )
    return table


def _largest(categories: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(categories.items(), key=lambda item: -item[1])[:3]


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
        "plans": [
            *(_plan(one, found, fits=True) for one in found.fitting),
            *(_plan(one, found, fits=False) for one in found.others),
        ],
        "refused": [{"plan": what, "reason": reason} for what, reason in found.refused],
        "reason": _verdict(found) if is_open else "",
        "warnings": [found.remark] if found.remark else [],
        "is_approximate": True,
        "needs": _NEEDS,
        "replayed_plans": found.tried,
    }


def _plan(one: SnapshotPlan, found: SnapshotPlans, *, fits: bool) -> dict[str, Any]:
    return {
        "fits": fits,
        "describe": one.what,
        "peak_allocated_bytes": one.peak_bytes,
        "peak_interval_bytes": list(one.bounds),
        "peak_phase": one.phase,
        "peak_module": None,
        "saved_bytes": found.recorded.peak_bytes - one.peak_bytes,
        "step_time_us": None,
        "step_time_interval_us": None,
        "slowdown": None,
        "how": "rule" if one.is_formula else "modelled",
        "numerics": one.numerics,
        "at_peak": one.categories,
        "policies": [
            {
                "policy": change.policy,
                "settings": None,
                "describe": change.what,
                "numerics": change.numerics,
                "how": "rule" if change.is_formula else "modelled",
                "advice": change.advice,
                "assumes": change.assumes,
            }
            for change in one.changes
        ],
        "peak_reserved_bytes": one.reserved_bytes,
        "peak_reserved_expandable_bytes": one.expandable_bytes,
        "host_bytes": None,
    }
