"""The page of `memprof suggest`."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path

from rich.table import Table
from rich.text import Text

from memprof.analysis.allocator.reserved import reserved_expandable
from memprof.analysis.plans.dry_check_results import Checked, confirmed, describe_difference, worth_keeping
from memprof.analysis.plans.suggest import Suggestion, describe_least, describe_peak, place_of
from memprof.cli.page import Page, cell, make_table
from memprof.cli.pages.drawings import draw_front
from memprof.cli.pages.next_commands import next_commands
from memprof.cli.pages.plan_page import fill_basis
from memprof.planners.search.candidate import Candidate
from memprof.units import format_bytes, format_bytes_change, format_count, format_us, format_us_between, printable

_MOST_ROWS = 10


def fill_suggestion(
    page: Page, found: Suggestion, written: Path | None, checked: tuple[Checked, ...] | None = None
) -> None:
    """Adds the result of a search to a page.

    Args:
        page: The page.
        found: The result.
        written: Path the fastest plan was written to; None if it was not.
        checked: Its plans that were dry-run; None if not requested.
    """
    answer = found.answer
    page.add(Text(printable(_verdict(found, checked or ())), style="bold"))
    for warning in found.warnings:
        page.add(Text(f"warning: {printable(warning)}", style="yellow"))
    if answer.was_stopped:
        page.add(Text("warning: the search was stopped early; there may be faster plans.", style="yellow"))
    recorded = answer.recorded
    known = f"at {found.basis.at}" if found.basis.at else "recorded"
    page.add(
        Text(
            f"{known}: peak {format_bytes(recorded.peak_bytes)} in {printable(place_of(recorded))}, step "
            f"{format_us(recorded.step_time_us)} | {format_count(answer.tried, 'plan')} replayed in "
            f"{answer.took_s:.1f} s",
            style="dim",
        )
    )
    fill_basis(page, found.basis)
    if answer.best is not None and not answer.best.policies:
        return
    if answer.schedule is not None:
        page.add(Text(printable(_schedule(found)), style="dim"))
    if warning := _reserves_more(found):
        page.add(Text(f"warning: {printable(warning)}", style="yellow"))
    if page.is_terminal:
        page.add("")
        for line in _front(found, page.width):
            page.add(line)
    page.add_section("Plans that fit", _plan_table(found), "the fastest of each kind")
    page.add_section("Dry runs", check_table(checked or ()), "the plans as applied, in order")
    page.add_section("Over budget", _other_table(found), "closest candidate of each kind")
    page.add_section("Not possible here", _refused_table(found))
    page.add("")
    if answer.best is not None:
        page.add(
            Text(
                f"lowest peak found: {describe_peak(answer.least)} with {printable(answer.least.plan.describe())}",
                style="dim",
            )
        )
    for command, reason in next_commands(found, written, checked):
        page.add(Text.assemble(("next: ", "dim"), printable(command), (f"  {reason}", "dim")))


def _verdict(found: Suggestion, checked: tuple[Checked, ...]) -> str:
    answer = found.answer
    best, budget = answer.best, format_bytes(answer.search_request.budget_bytes)
    if checked:
        kept = worth_keeping(checked)
        if kept is None:
            return describe_none(checked)
        best = next((one for one in found.plans if one.plan == kept.plan), best)
    if best is None:
        return describe_least(found)
    if not best.policies and found.ran_out:
        peak = format_bytes(best.peak_bytes)
        return f"The recorded steps fit: their peak of {peak} is within {budget}. Memory ran out in a later step."
    if not best.policies:
        return f"The job already fits: its peak of {format_bytes(best.peak_bytes)} is within {budget}."
    return (
        f"Within {budget}: {best.plan.describe()}, peak {_peak(best, checked)}, step time "
        f"{_change(best, answer.recorded)}{_expected_time(best, found)}.{describe_check(checked)}"
    )


def _peak(one: Candidate, checked: tuple[Checked, ...]) -> str:
    """Returns a plan's peak; as bounds if neither replay nor a dry run determines it to the byte."""
    is_known = one.interval.is_exact or any(check.plan == one.plan and check.fits is not None for check in checked)
    return format_bytes(one.peak_bytes) if is_known else f"{describe_peak(one)}, not checked"


def _expected_time(one: Candidate, found: Suggestion) -> str:
    """Returns the bounds of a plan's step time as a clause; "" where they are unknown."""
    times = found.time_interval(one)
    return "" if times is None else f" (expect {format_us_between(times.least_us, times.most_us)})"


def _reserves_more(found: Suggestion) -> str:
    """Returns a warning if the fastest plan's tensors fit but the segments that hold them do not; "" otherwise."""
    budget = found.answer.search_request.budget_bytes
    reserved = found.reserved[0] if found.reserved else None
    if reserved is None or reserved <= budget:
        return ""
    step = found.basis.fullest_under(found.plans[0].plan)
    expandable = reserved_expandable(step, found.manifest)
    others = [number for number, size in enumerate(found.reserved, start=1) if size is not None and size <= budget]
    ways = []
    if expandable is not None and expandable <= budget:
        ways.append(f"with --allocator expandable_segments it reserves {format_bytes(expandable)}")
    if others:
        ways.append(f"plan {others[0]} reserves no more than the budget")
    if not ways:
        ways.append(f"search with --budget {max(budget - (reserved - budget), 0)} to leave room for it")
    return (
        f"as modelled, the allocator reserves {format_bytes(reserved)} for the fastest plan's "
        f"{format_bytes(found.plans[0].peak_bytes)}, more than the budget: {'; '.join(ways)}."
    )


def _front(found: Suggestion, width: int) -> list[Text]:
    """Returns the plans of the page by peak and step time, drawn; nothing where step times are unknown."""
    recorded = found.answer.recorded
    if not recorded.step_time_us or not math.isfinite(recorded.step_time_us):
        return []
    plans = [one for one in (*found.plans, *found.others) if math.isfinite(one.step_time_us)]
    points = [(one.peak_bytes, one.step_time_us / recorded.step_time_us - 1) for one in (recorded, *plans)]
    return draw_front(points, found.answer.search_request.budget_bytes, width)


def _schedule(found: Suggestion) -> str:
    """Returns a planner's per-operator schedule, compared with what can be applied."""
    made = found.answer.schedule
    assert made is not None
    if not made.peak_bytes:
        return f"{made.planner}: {made.status}. {made.reason}"
    change = made.step_time_us / found.answer.recorded.step_time_us - 1 if found.answer.recorded.step_time_us else 0.0
    return (
        f"{made.planner}, recomputing single operators: peak {format_bytes(made.peak_bytes)}, step time "
        f"{100 * change:+.1f} % ({made.status}). {made.reason} Plans choose the modules it recomputes."
    )


def _change(one: Candidate, recorded: Candidate) -> str:
    if not recorded.step_time_us:
        return "unknown"
    change = one.step_time_us / recorded.step_time_us - 1
    return f"{100 * change:+.1f} %" if math.isfinite(change) else "unknown"


def _plan_table(found: Suggestion) -> Table:
    on_device = found.basis.step.is_on_device()
    takes_host = any(found.host_bytes)
    extra = [*([">reserved"] if on_device else []), *([">on the host"] if takes_host else [])]
    table = make_table("", "plan", ">peak", *extra, ">saved", ">step time", ">change", "peak in", "source, numerics")
    recorded = found.answer.recorded
    rows = zip(found.plans, found.reserved, found.host_bytes, strict=True)
    for number, (one, reserved, host) in enumerate(islice(rows, _MOST_ROWS), start=1):
        table.add_row(
            str(number),
            Text(printable(one.plan.describe())),  # the action is not truncated
            describe_peak(one),
            *([] if reserved is None else [format_bytes(reserved)]),
            *([format_bytes(host) if host else "-"] if takes_host else []),
            format_bytes(recorded.peak_bytes - one.peak_bytes),
            format_us(one.step_time_us),
            _change(one, recorded),
            cell(place_of(one)),
            cell(f"{found.source_of(one)}, {'same' if one.numerics == 'none' else one.numerics}"),
        )
    return table


def _other_table(found: Suggestion) -> Table:
    table = make_table("plan", ">peak", ">over by", ">change", "peak in", "largest category")
    budget, recorded = found.answer.search_request.budget_bytes, found.answer.recorded
    for one in found.others[:_MOST_ROWS]:
        over, most_host = found.answer.search_request.needed(one) - budget, found.answer.search_request.most_host_bytes
        host_over = 0 if most_host is None else one.host_bytes - most_host
        name, size = max(one.categories.items(), key=lambda item: item[1], default=("", 0))
        table.add_row(
            Text(printable(one.plan.describe())),
            describe_peak(one),
            _over_by(over, host_over, is_reserved=budget + over == one.reserved_bytes),
            _change(one, recorded),
            cell(place_of(one)),
            cell(f"{name} {format_bytes(size)}"),
        )
    return table


def _over_by(over: int, host_over: int, *, is_reserved: bool) -> str:
    """Returns the bytes by which a plan, or what is reserved for it, exceeds the device's budget, or the host's."""
    if over > 0:
        return format_bytes_change(over) + (", reserved" if is_reserved else "")
    return f"{format_bytes_change(host_over)} on the host" if host_over > 0 else "too slow"


def _refused_table(found: Suggestion) -> Table:
    table = make_table("plan", "why")
    # For a reason shared by many plans, show the shortest plan.
    by_reason: dict[str, str] = {}
    for plan, reason in sorted(found.answer.refused, key=lambda one: len(one[0])):
        by_reason.setdefault(reason, plan)
    for reason, plan in list(by_reason.items())[:_MOST_ROWS]:
        table.add_row(cell(plan), printable(reason))
    return table


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
