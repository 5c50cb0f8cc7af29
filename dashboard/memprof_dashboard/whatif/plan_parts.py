"""Tables and texts of the what-if page: search results, one plan, and the planner comparison."""

from __future__ import annotations

import math
from typing import Any

from dash import html

from memprof.analysis.plans.compare_planners import Point
from memprof.analysis.plans.planner_tables import MARKS, overheads, planners
from memprof.analysis.plans.suggest import Suggestion, describe_least, describe_peak, place_of
from memprof.analysis.plans.verify import describe_short
from memprof.planners.search.candidate import Candidate
from memprof.policies.plan.plan_tables import NUMERICS_IN_WORDS
from memprof.units import format_bytes, format_bytes_change, format_count, format_us
from memprof_dashboard import parts
from memprof_dashboard.palette import fill_of
from memprof_dashboard.whatif.planning import Detail, Run, plans_of

#: Kinds of plans listed at most.
_MOST_ROWS = 20
#: Type of the buttons that choose a plan.
ROW = "whatif-row"


def verdict(found: Suggestion) -> str:
    """Returns the result of a search as a sentence."""
    best, budget = found.answer.best, format_bytes(found.answer.search_request.budget_bytes)
    if best is None:
        return describe_least(found)
    if not best.policies:
        return f"The job already fits: its peak of {format_bytes(best.peak_bytes)} is within {budget}."
    return f"Within {budget}: {best.plan.describe()}, peak {describe_peak(best)}, step time {change(best, found)}."


def change(one: Candidate, found: Suggestion) -> str:
    """Returns a plan's step time against the recorded one: ``+12.3 %``."""
    recorded = found.answer.recorded.step_time_us
    ratio = one.step_time_us / recorded - 1 if recorded else math.nan
    return f"{100 * ratio:+.1f} %" if math.isfinite(ratio) else "unknown"


def summary(found: Suggestion) -> list[Any]:
    """Returns the verdict and its caveats."""
    answer = found.answer
    remarks = list(found.warnings)
    if answer.was_stopped:
        remarks.append("The search was stopped early; there may be faster plans.")
    recorded = answer.recorded
    known = (
        f"Recorded: peak {format_bytes(recorded.peak_bytes)} in {place_of(recorded)}, step "
        f"{format_us(recorded.step_time_us)}. {format_count(answer.tried, 'plan')} replayed in "
        f"{answer.took_s:.1f} s. Lowest peak found: {describe_peak(answer.least)} with {answer.least.plan.describe()}."
    )
    return [
        html.P(parts.sentence(verdict(found), 1000), className="verdict"),
        html.P(parts.sentence(known, 700), className="note"),
        *(html.P(remark, className="warning") for remark in remarks),
    ]


def fitting(found: Suggestion) -> list[Any]:
    """Returns the table of the plans that fit, the fastest of each kind; nothing where none does."""
    places = {id(one): place for place, one in enumerate(plans_of(found))}
    shown = [one for one in found.plans[:_MOST_ROWS] if one.policies]
    if not shown:
        return []
    recorded = found.answer.recorded
    rows = [
        [
            choice(one.plan.describe(), places[id(one)]),
            describe_peak(one),
            format_bytes(recorded.peak_bytes - one.peak_bytes),
            format_us(one.step_time_us),
            change(one, found),
            parts.name(place_of(one), 40),
            found.source_of(one),
            "bit-identical" if one.numerics == "none" else one.numerics,
        ]
        for one in shown
    ]
    heads = ["plan", ">peak", ">saved", ">step time", ">change", "peak in", "estimate", "numerics"]
    return [
        html.H3("Plans that fit"),
        parts.note(f"Fastest of each kind, out of {len(found.answer.fitting):,}. Select one to see its step."),
        parts.table(heads, rows, label="plans that fit"),
    ]


def others(found: Suggestion) -> list[Any]:
    """Returns the table of the plans over budget, and why; empty where there are none."""
    if not found.others:
        return []
    places = {id(one): place for place, one in enumerate(plans_of(found))}
    budget = found.answer.search_request.budget_bytes
    rows = []
    for one in found.others[:_MOST_ROWS]:
        name, size = max(one.categories.items(), key=lambda item: item[1], default=("unknown", 0))
        over = found.answer.search_request.needed(one) - budget
        reserved = ", reserved" if budget + over == one.reserved_bytes else ""
        rows.append(
            [
                choice(one.plan.describe(), places[id(one)]),
                describe_peak(one),
                f"{format_bytes_change(over)}{reserved}" if over > 0 else "too slow",
                change(one, found),
                parts.name(place_of(one), 40),
                parts.sentence(f"{fill_of(name).label} {format_bytes(size)}", 60),
            ]
        )
    heads = ["plan", ">peak", ">over by", ">step time change", "peak in", "largest category"]
    return [
        html.H3("Over budget"),
        parts.note("Closest candidate of each kind without a plan that fits."),
        parts.table(heads, rows, label="plans over budget"),
    ]


def refused(found: Suggestion) -> list[Any]:
    """Returns what is not possible for this job, and why; nothing where everything is."""
    # The shortest plan represents all plans refused for the same reason.
    by_reason: dict[str, str] = {}
    for plan, reason in sorted(found.answer.refused, key=lambda one: len(one[0])):
        by_reason.setdefault(reason, plan)
    if not by_reason:
        return []
    rows = [[parts.name(plan), reason] for reason, plan in list(by_reason.items())[:_MOST_ROWS]]
    return [html.H3("Not possible here"), parts.table(["plan", "reason"], rows, label="plans not possible here")]


def tried_table(found: Suggestion, on_front: list[bool]) -> Any:
    """Returns the table of what the plot of plans shows."""
    most = 100
    plans = plans_of(found)
    rows: list[list[Any]] = [
        [
            parts.name(one.plan.describe()),
            f"{one.peak_bytes:,}",
            f"{one.step_time_us:,.0f}",
            "yes" if front else "",
        ]
        for one, front in list(zip(plans, on_front, strict=True))[:most]
    ]
    if len(plans) > most:
        rows.append([f"{len(plans) - most:,} more not listed", "", "", ""])
    heads = ["plan", ">peak, bytes", ">step time, us", "Pareto-optimal"]
    return parts.as_table(heads, rows, label="all plans tried")


def choice(text: str, place: int) -> html.Button:
    """Returns the button that chooses a plan by its place among all."""
    return html.Button(parts.name(text, 160), id={"type": ROW, "plan": place}, type="button", className="words")


def plan_facts(detail: Detail, one: Candidate, found: Suggestion) -> list[Any]:
    """Returns a plan's effects, policy by policy, and its prediction."""
    recorded = found.answer.recorded
    budget = found.answer.search_request.budget_bytes
    rows: list[list[Any]] = [
        ["as recorded", format_bytes(recorded.peak_bytes), "", format_us(recorded.step_time_us), ""]
    ]
    before = (recorded.peak_bytes, recorded.step_time_us)
    for stage in detail.stages:
        after = (stage.peak_allocated_bytes, stage.step_time_us)
        rows.append(
            [
                parts.name(stage.policy.describe(), 200),
                format_bytes(after[0]),
                format_bytes_change(after[0] - before[0]),
                format_us(after[1]),
                NUMERICS_IN_WORDS[stage.policy.numerics].removeprefix("numerics "),
            ]
        )
        before = after
    over = found.answer.search_request.needed(one) - budget
    fits = f"{format_bytes(-over)} below budget" if over <= 0 else f"{format_bytes(over)} over budget"
    is_exact = one.interval.least_bytes == one.interval.most_bytes
    within = "" if is_exact else f" ({describe_peak(one)} with the errors of other jobs)"
    summary = (
        f"peak in {place_of(one)}{within}, {fits}; step time {format_us(one.step_time_us)} ({change(one, found)}). "
        f"Estimate: {found.source_of(one)}; {NUMERICS_IN_WORDS[one.numerics]}."
    )
    return [
        html.H3(parts.name(one.plan.describe(), 300)),
        html.P([html.Strong(format_bytes(one.peak_bytes)), " ", parts.sentence(summary, 500)]),
        parts.table(
            ["policy", ">peak after it", ">change", ">step time", "numerics"], rows, label="plan, policy by policy"
        ),
    ]


def command_of(save: str, command: str) -> list[Any]:
    """Returns how to train under a plan: a button that saves the plan and copies the command, and the command.

    Args:
        save: Id of the button, whose clicks download the plan.
        command: The command.
    """
    copied: Any = {"data-copy": command}
    return [
        html.P("Train under the plan to verify the prediction:", className="note"),
        html.Div(
            [
                html.Button(
                    "Save plan.toml, copy command",
                    id=save,
                    type="button",
                    title="downloads the plan; the command expects it where it runs",
                    **copied,
                ),
                parts.command(command),
            ],
            className="command",
        ),
    ]


def run_table(runs: tuple[Run, ...]) -> list[Any]:
    """Returns the table of the recordings made under a plan."""
    if not runs:
        return []
    rows = []
    for run in runs:
        if run.found is None:
            rows.append([parts.name(run.name, 40), parts.name(run.plan), "", "", "", run.refusal])
            continue
        error = run.found.peak_error_bytes
        ratio = run.found.peak_error_ratio
        share = f" ({100 * ratio:+.1f} %)" if math.isfinite(ratio) and error else ""
        rows.append(
            [
                parts.name(run.name, 40),
                parts.name(run.plan),
                format_bytes(run.found.predicted.peak_allocated_bytes),
                format_bytes(run.found.measured.peak_allocated_bytes),
                f"{format_bytes_change(error)}{share}" if error else "exact",
                parts.name(" ".join([describe_short(run.found), *run.found.warnings]), 400),
            ]
        )
    heads = ["run", "plan", ">predicted peak", ">measured peak", ">error", "result"]
    return [
        html.H3("Verified runs"),
        parts.note(
            "Other open recordings of the same model that were made under a plan: predicted against measured peak."
        ),
        parts.table(heads, rows, label="verified runs"),
    ]


def planner_table(points: tuple[Point, ...]) -> list[Any]:
    """Returns what every planner needs at every budget, and what the planners do."""
    return [
        parts.note(f"Overhead over the recorded step time. {MARKS}."),
        parts.facts(overheads(points), label="overhead by planner and budget"),
        html.Details([html.Summary("planners"), parts.facts(planners(), label="planners")], className="as-table"),
    ]
