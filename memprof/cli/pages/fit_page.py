"""The result of `memprof fit`, as a page and as JSON."""

from __future__ import annotations

import math
import shlex

from rich.table import Table
from rich.text import Text

from memprof.analysis.plans.dry_check_results import describe_difference
from memprof.analysis.plans.plan_json import PLAN_SCHEMA, plan_to_json
from memprof.cli.page import Page, cell, make_table
from memprof.json_values import Json
from memprof.launch.fit.request import Attempt, FitResult, Measured
from memprof.units import format_bytes, format_bytes_of, format_us, printable


def fill_fit(page: Page, found: FitResult, job: str) -> None:
    """Adds the result of a fit to a page.

    Args:
        page: The page.
        found: The result.
        job: The job's command line, for the next command.
    """
    page.add(Text(printable(_verdict(found)), style="bold"))
    for warning in found.warnings:
        page.add(Text(f"warning: {printable(warning)}", style="yellow"))
    if found.recorded is not None:
        peak, time = format_bytes(found.recorded.peak_bytes), _time(found.recorded.step_time_us)
        how = ", in a dry run because the job itself ran out of memory" if found.is_from_dry_run else ""
        page.add(Text(f"as it is{how}: peak {peak}, step {time}", style="dim"))
    page.add_section("Runs under a plan", _attempt_table(found), "in order")
    if found.best is not None and not _is_compiled(found.best):
        page.add_section("Predicted and measured", _comparison_table(found.best))
    if found.best is not None:
        page.add("")
        page.add(f"plan written to {printable(str(found.request.outputs.plan))}; in your own code:")
        page.add("")
        for line in code_of(found):
            page.add(Text(f"    {line}"))
        page.add("")
    for command, reason in _next(found, job):
        page.add(Text.assemble(("next: ", "dim"), printable(command), (f"  {reason}", "dim")))


def fit_to_json(found: FitResult, job: str) -> Json:
    """Returns the result of a fit as JSON containers.

    Args:
        found: The result.
        job: The job's command line, for the next command.
    """
    best, outputs = found.best, found.request.outputs
    return {
        "schema": PLAN_SCHEMA,
        "target": found.request.target.name,
        "budget_bytes": found.budget_bytes or None,
        "measured_bytes": _measured_bytes(found),
        "fits": best is not None or found.is_met,
        "fits_as_it_is": found.is_met,
        "recorded_in_dry_run": found.is_from_dry_run,
        "recorded": _measured(found.recorded),
        "attempts": [_attempt(attempt) for attempt in found.attempts],
        "plan": None if best is None else _attempt(best),
        "least_measured_bytes": found.least_bytes or None,
        "files": {
            "plan": str(outputs.plan) if best is not None else None,
            "run": str(outputs.run) if outputs.run.is_file() else None,
            "head": str(outputs.head) if best is not None else None,
        },
        "code": "\n".join(code_of(found)) if best is not None else None,
        "next": [command for command, _ in _next(found, job)],
        "reason": found.reason,
        "ended_by": found.ended_by or None,
        "warnings": list(found.warnings),
    }


def code_of(found: FitResult) -> list[str]:
    """Returns the lines that apply the plan in the user's own code."""
    return ["import memprof", f"memprof.apply({str(found.request.outputs.plan)!r}, model, optimizer)"]


def _verdict(found: FitResult) -> str:
    best, recorded, budget = found.best, found.recorded, format_bytes(found.budget_bytes)
    if found.is_met and recorded is not None:
        peak = format_bytes(recorded.peak_bytes)
        return f"The job already fits: its peak of {peak} is within {budget}. No plan was written."
    if best is None or best.measured is None or recorded is None:
        return found.reason
    more = " Interrupted: this is the best plan verified so far." if found.ended_by else ""
    figures = format_bytes_of(best.measured.peak_bytes, found.budget_bytes)
    return (
        f"Within the budget, measured: {figures}, under {best.plan.describe()}"
        f"{_change(best.measured.step_time_us, recorded.step_time_us)}.{more}"
    )


def _change(now_us: float, before_us: float) -> str:
    if not (math.isfinite(now_us) and math.isfinite(before_us) and before_us):
        return ""
    return f", step time {100 * (now_us / before_us - 1):+.1f} %"


def _attempt_table(found: FitResult) -> Table:
    is_dry = any(one.dry_bytes is not None for one in found.attempts)
    columns = [">dry run", ">difference"] if is_dry else []
    table = make_table("", "plan", ">predicted", *columns, ">measured", ">step time", "result")
    words = {
        "fits": "within the budget",
        "above": "above the budget",
        "refused": "refused: ",
        "failed": "failed: ",
        "passed over": "skipped: its dry run is above the budget",
    }
    for number, one in enumerate(found.attempts, start=1):
        peak = "" if one.measured is None else format_bytes(one.measured.peak_bytes)
        time = "" if one.measured is None else _time(one.measured.step_time_us)
        prediction = one.plan.prediction
        text = words[one.outcome] + printable(one.reason) + (", kept" if one is found.best else "")
        plan = cell(one.plan.describe())
        predicted = (
            "only measured"
            if _is_compiled(one) or prediction is None
            else format_bytes(prediction.peak_allocated_bytes)
        )
        dry = _dry_cells(one) if is_dry else ()
        table.add_row(str(number), plan, predicted, *dry, peak, time, text)
    return table


def _dry_cells(one: Attempt) -> tuple[str, str]:
    """Returns a dry run's peak, and the prediction's error."""
    prediction = one.plan.prediction
    if one.dry_bytes is None or prediction is None:
        return "", ""
    return format_bytes(one.dry_bytes), describe_difference(one.dry_bytes, prediction.peak_allocated_bytes)


def _comparison_table(best: Attempt) -> Table:
    table = make_table("", ">predicted", ">measured", ">error")
    prediction, measured = best.plan.prediction, best.measured
    assert measured is not None  # verified
    assert prediction is not None
    peaks = prediction.peak_allocated_bytes, measured.peak_bytes
    times = prediction.step_time_us, measured.step_time_us
    table.add_row("peak", format_bytes(peaks[0]), format_bytes(peaks[1]), _error(*peaks))
    table.add_row("step time", _time(times[0]), _time(times[1]), _error(*times))
    return table


def _error(predicted: float, measured: float) -> str:
    if not math.isfinite(measured) or not measured:
        return ""
    return "exact" if predicted == measured else f"{100 * (predicted / measured - 1):+.1f} %"


def _next(found: FitResult, job: str) -> list[tuple[str, str]]:
    outputs = found.request.outputs
    if found.best is not None:
        return [(f"memprof record --plan {shlex.quote(str(outputs.plan))} {job}", "the full run under the plan")]
    if not outputs.run.is_file():
        return []
    run = shlex.quote(str(outputs.run))
    report = (f"memprof report {run}", "what fills its memory")
    if found.returncode or found.is_met:
        return [report]
    return [(f"memprof suggest {run} --budget {found.budget_bytes}", "all plans found"), report]


def _time(duration_us: float) -> str:
    return format_us(duration_us) if math.isfinite(duration_us) else "not measured"


def _is_compiled(attempt: Attempt) -> bool:
    """Returns whether the plan compiles, so that its effect could only be measured."""
    return any(policy.source == "measured" for policy in attempt.plan.policies)


def _measured(measured: Measured | None) -> Json | None:
    if measured is None:
        return None
    return {
        "peak_allocated_bytes": measured.peak_bytes,
        "step_time_us": measured.step_time_us if math.isfinite(measured.step_time_us) else None,
        "rank": measured.rank,
    }


def _measured_bytes(found: FitResult) -> int | None:
    """Returns the peak under the plan that was kept, or of the unmodified job if it fits; None if neither."""
    measured = found.recorded if found.is_met else None if found.best is None else found.best.measured
    return None if measured is None else measured.peak_bytes


def _attempt(attempt: Attempt) -> Json:
    prediction = None if _is_compiled(attempt) else attempt.plan.prediction
    return {
        "describe": attempt.plan.describe(),
        "policies": plan_to_json(attempt.plan),
        "outcome": attempt.outcome,
        "reason": attempt.reason,
        "predicted": None
        if prediction is None
        else {
            "peak_allocated_bytes": prediction.peak_allocated_bytes,
            "step_time_us": prediction.step_time_us,
            "how": prediction.how,
        },
        "dry_run": None
        if attempt.dry_bytes is None
        else {
            "peak_allocated_bytes": attempt.dry_bytes,
            "difference_bytes": None if prediction is None else attempt.dry_bytes - prediction.peak_allocated_bytes,
        },
        "measured": _measured(attempt.measured),
    }
