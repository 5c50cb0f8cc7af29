"""The results of dry runs on the page of `memprof suggest`."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from memprof.analysis.plans.dry_check_results import Checked, confirmed, describe_difference
from memprof.cli.page import make_table, printable
from memprof.units import format_bytes, format_bytes_change


def describe_check(checked: tuple[Checked, ...]) -> str:
    """Returns whether a dry run confirms the plan that is kept, to follow the verdict; "" without a dry run."""
    if not checked:
        return ""
    found = confirmed(checked)
    if found is None or found.dry_bytes is None:
        return " No dry run confirms it."
    error = describe_difference(found.dry_bytes, found.predicted_bytes)
    return f" Confirmed by a dry run: peak {format_bytes(found.dry_bytes)} ({error})."


def describe_none(checked: tuple[Checked, ...]) -> str:
    """Returns a sentence: every dry-run plan exceeds the budget as applied."""
    budget = format_bytes(checked[0].budget_bytes)
    if len(checked) == 1:
        plan = checked[0].plan.describe()
        return f"In a dry run, {plan} exceeds {budget}, contrary to the prediction: not kept."
    return f"Of {len(checked)} plans predicted to be within {budget}, none is within it in a dry run: none is kept."


def check_table(checked: tuple[Checked, ...]) -> Table:
    """Returns the table of checked plans, one row per plan."""
    table = make_table("plan", ">predicted", ">dry run", ">error", "result")
    for one in checked:
        table.add_row(
            Text(printable(one.plan.describe())),
            format_bytes(one.predicted_bytes),
            "" if one.dry_bytes is None else format_bytes(one.dry_bytes),
            "" if one.dry_bytes is None else describe_difference(one.dry_bytes, one.predicted_bytes),
            Text(printable(_came(one))),
        )
    return table


def _came(one: Checked) -> str:
    if one.dry_bytes is None:
        return f"unchecked: {one.reason}"
    if one.fits:
        return "fits"
    what = "" if one.dry_bytes > one.budget_bytes else ", reserved"
    return f"{format_bytes_change(one.excess_bytes)} over{what}"
