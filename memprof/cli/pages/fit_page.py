"""The result of `memprof fit`, as a page and as JSON."""

from __future__ import annotations

import math
import shlex
from operator import attrgetter

from memprof.analysis.plans.dry_check_results import describe_difference
from memprof.analysis.plans.plan_json import PLAN_SCHEMA, counters, plan_policies
from memprof.analysis.plans.plan_rows import POLICIES
from memprof.analysis.table import (
    BYTES,
    BYTES_CHANGE,
    FIGURE,
    NAMES,
    NUMBER,
    US,
    WORDS,
    Column,
    FactTable,
    record,
    records,
    row_of,
    rows_of,
    shown,
)
from memprof.cli.page import Page
from memprof.json_values import Json
from memprof.launch.fit.request import Attempt, FitResult
from memprof.units import format_bytes, format_bytes_of, format_us, printable


def fill_fit(page: Page, found: FitResult, job: str) -> None:
    """Adds the result of a fit to a page."""
    page.say(_verdict(found), "bold")
    page.warn(*found.warnings)
    if found.recorded is not None:
        peak, time = format_bytes(found.recorded.peak_bytes), _time(found.recorded.step_time_us)
        how = ", in a dry run because the job itself ran out of memory" if found.is_from_dry_run else ""
        page.say(f"as it is{how}: peak {peak}, step {time}", "dim")
    page.add_section("Runs under a plan", _attempts(found), "in order")
    if found.best is not None and not _is_compiled(found.best):
        page.add_section("Predicted and measured", _compared(found.best))
    if found.best is not None:
        page.add("")
        page.add(f"plan written to {printable(str(found.request.outputs.plan))}; in your own code:")
        page.add("")
        for line in code_of(found):
            page.say(f"    {line}")
        page.add("")
    page.add_next(*_next(found, job))


def fit_to_json(found: FitResult, job: str) -> Json:
    """Returns the result of a fit as JSON containers."""
    best, outputs = found.best, found.request.outputs
    return {
        "schema": PLAN_SCHEMA,
        "target": found.request.target.name,
        "budget_bytes": found.budget_bytes or None,
        "measured_bytes": _measured_bytes(found),
        "fits": best is not None or found.is_met,
        "fits_as_it_is": found.is_met,
        "recorded_in_dry_run": found.is_from_dry_run,
        "recorded": None if found.recorded is None else record(MEASURED, found.recorded),
        "attempts": records(ATTEMPTS, found.attempts),
        "plan": None if best is None else record(ATTEMPTS, best),
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


def _predicted(one: Attempt) -> str:
    prediction = None if _is_compiled(one) else one.plan.prediction
    return "only measured" if prediction is None else format_bytes(prediction.peak_allocated_bytes)


def _difference(one: Attempt) -> str:
    """Returns a dry run's peak against the predicted one; "" without both."""
    prediction = one.plan.prediction
    if one.dry_bytes is None or prediction is None:
        return ""
    return describe_difference(one.dry_bytes, prediction.peak_allocated_bytes)


_OUTCOMES = {
    "fits": "within the budget",
    "above": "above the budget",
    "refused": "refused: ",
    "failed": "failed: ",
    "passed over": "skipped: its dry run is above the budget",
}
_PREDICTED = (Column("peak_allocated_bytes", None, BYTES), Column("step_time_us", None, US), Column("how", None))
MEASURED = (
    Column("peak_allocated_bytes", None, BYTES, attrgetter("peak_bytes")),
    Column("step_time_us", None, US),
    Column("rank", None, NUMBER),
)
_DRY_RUN = (
    Column("peak_allocated_bytes", None, BYTES, attrgetter("dry_bytes")),
    Column("difference_bytes", None, BYTES_CHANGE),
    Column("peak_reserved_bytes", None, BYTES, lambda one: one.dry_reserved_bytes or None),
)
#: Runs of the job under a plan.
ATTEMPTS = (
    Column("describe", "plan", NAMES, lambda one: one.plan.describe()),
    Column("policies", None, rows_of(POLICIES), lambda one: plan_policies(one.plan)),
    Column("predicted", None, row_of(_PREDICTED), lambda one: None if _is_compiled(one) else one.plan.prediction),
    shown("predicted", FIGURE, _predicted, key="prediction"),
    Column("dry_run", None, row_of(_DRY_RUN), lambda one: None if one.dry_bytes is None else one),
    shown("dry run", BYTES, attrgetter("dry_bytes"), is_optional=True),
    shown("difference", FIGURE, _difference, is_optional=True),
    shown("reserved", BYTES, lambda one: one.dry_reserved_bytes or None, meaning="in the dry run", is_optional=True),
    Column("measured", None, row_of(MEASURED)),
    shown("measured", BYTES, lambda one: one.measured and one.measured.peak_bytes, key="peak"),
    shown("step time", FIGURE, lambda one: "" if one.measured is None else _time(one.measured.step_time_us)),
    Column("outcome", None),
    Column("reason", None),
)


def _attempts(found: FitResult) -> FactTable:
    def result(one: Attempt) -> str:
        return _OUTCOMES[one.outcome] + one.reason + (", kept" if one is found.best else "")

    numbers = {id(one): number for number, one in enumerate(found.attempts, start=1)}
    columns = (shown("", NUMBER, lambda one: numbers[id(one)]), *ATTEMPTS, shown("result", WORDS, result))
    return FactTable(columns, found.attempts)


def _compared(best: Attempt) -> FactTable:
    prediction, measured = best.plan.prediction, best.measured
    assert measured is not None  # verified
    assert prediction is not None
    peaks = (prediction.peak_allocated_bytes, measured.peak_bytes)
    return counters(peaks, (prediction.step_time_us, measured.step_time_us))


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


def _measured_bytes(found: FitResult) -> int | None:
    """Returns the peak under the plan that was kept, or of the unmodified job if it fits; None if neither."""
    measured = found.recorded if found.is_met else None if found.best is None else found.best.measured
    return None if measured is None else measured.peak_bytes
