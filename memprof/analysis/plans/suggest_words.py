"""The result of a search for plans in sentences."""

from __future__ import annotations

import math

from memprof.analysis.plans.dry_check_results import Checked, confirmed, describe_difference, worth_keeping
from memprof.analysis.plans.suggest import Suggestion, describe_least, describe_peak, place_of
from memprof.planners.search.candidate import Candidate
from memprof.units import format_bytes, format_count, format_percent_change, format_us, format_us_between

#: Settings of a plan that the verdict lists; the table has those of every plan.
_MOST_SETTINGS = 12


def verdict(found: Suggestion, checked: tuple[Checked, ...] = ()) -> str:
    """Returns the result: the fastest plan that fits, or why none does."""
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
        f"Within {budget}: {_briefly(best, found)}, peak {_peak(best, checked)}, step time "
        f"{describe_slowdown(best, found)}{_expected_time(best, found)}.{describe_check(checked)}"
    )


def _briefly(one: Candidate, found: Suggestion) -> str:
    """Returns what a plan is; only its policies if it has more settings than a sentence holds."""
    if one.settings <= _MOST_SETTINGS or one not in found.plans:
        return found.short(one.plan.describe())
    kinds = dict.fromkeys(policy.name for policy in one.policies)
    return f"plan {found.plans.index(one) + 1} ({', '.join(kinds)}: {one.settings} settings)"


def describe_slowdown(one: Candidate, found: Suggestion) -> str:
    """Returns a plan's step time against the recorded one: ``+12.3 %``."""
    recorded_us = found.answer.recorded.step_time_us
    return format_percent_change(one.step_time_us / recorded_us - 1 if recorded_us else math.nan)


def describe_simplest(found: Suggestion) -> str:
    """Returns what the fastest plan buys over the simplest that fits; "" where it is about as simple."""
    if not found.simplest:
        return ""
    fastest, simplest = found.plans[0], found.plans[found.simplest - 1]
    return (
        f"simplest that fits: {found.short(simplest.plan.describe())} (plan {found.simplest}), {simplest.settings:,} "
        f"instead of {format_count(fastest.settings, 'setting')}, step time {describe_slowdown(simplest, found)} "
        f"instead of {describe_slowdown(fastest, found)}"
    )


def describe_recorded(found: Suggestion) -> str:
    """Returns the step without a plan, and how much was searched."""
    answer = found.answer
    known = f"at {found.basis.at}" if found.basis.at else "recorded"
    below = f" | modules are named below {found.prefix.removesuffix('.')}" if found.prefix else ""
    return (
        f"{known}: peak {format_bytes(answer.recorded.peak_bytes)} in {found.short(place_of(answer.recorded))}, step "
        f"{format_us(answer.recorded.step_time_us)} | {format_count(answer.tried, 'plan')} replayed in "
        f"{answer.took_s:.1f} s{below}"
    )


def caveats(found: Suggestion) -> list[str]:
    """Returns what to know of the figures."""
    early = "the search was stopped early; a longer one (--time-limit) may find faster plans."
    best = found.answer.best
    rounding = "" if best is None else found.basis.describe_rounding(best.plan, found.manifest.torch_version)
    return [*found.warnings, *filter(None, [rounding]), *([early] if found.answer.was_stopped else [])]


def _peak(one: Candidate, checked: tuple[Checked, ...]) -> str:
    """Returns a plan's peak; as bounds if neither replay nor a dry run determines it to the byte."""
    is_known = one.interval.is_exact or any(check.plan == one.plan and check.fits is not None for check in checked)
    return format_bytes(one.peak_bytes) if is_known else f"{describe_peak(one)}, not checked"


def _expected_time(one: Candidate, found: Suggestion) -> str:
    """Returns the bounds of a plan's step time as a clause; "" where they are unknown."""
    times = found.time_interval(one)
    return "" if times is None else f" (expect {format_us_between(times.least_us, times.most_us)})"


def describe_reserved(found: Suggestion) -> str:
    """Returns a warning if the fastest plan's tensors fit but the segments that hold them do not; "" otherwise."""
    budget = found.answer.search_request.budget_bytes
    reserved = found.reserved[0] if found.reserved else None
    if reserved is None or reserved <= budget:
        return ""
    others = [number for number, size in enumerate(found.reserved, start=1) if size is not None and size <= budget]
    smaller = f"search with --budget {max(budget - (reserved - budget), 0)} to leave room for it"
    way = f"plan {others[0]} reserves no more than the budget" if others else smaller
    return (
        f"as modelled, the allocator reserves {format_bytes(reserved)} for the fastest plan's "
        f"{format_bytes(found.plans[0].peak_bytes)}, more than the budget: {way}."
    )


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
    """Returns a sentence: every dry-run plan exceeds the budget as applied, and how many were not dry-run."""
    budget = format_bytes(checked[0].budget_bytes)
    if len(checked) == 1:
        plan = checked[0].plan.describe()
        return f"In a dry run, {plan} exceeds {budget}, contrary to the prediction: not kept."
    unchecked = sum(check.fits is None for check in checked)
    rest = f", and {unchecked} {'is' if unchecked == 1 else 'are'} unchecked" if unchecked else ""
    plans = f"{len(checked)} plans predicted to be within {budget}"
    return f"Of {plans}, none is confirmed by a dry run: {len(checked) - unchecked} over budget{rest}. None is kept."
