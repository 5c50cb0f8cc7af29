"""Suggestions, predictions and their verification as JSON containers, and the tables of the latter two."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter

from memprof.analysis.diff.budget import NO_BUDGET
from memprof.analysis.plans.dry_check_results import CHECKED, Checked
from memprof.analysis.plans.plan_rows import (
    PLANS,
    POLICIES,
    REFUSED,
    STAGES,
    PolicyRow,
    policy_row,
    rows_of_search,
)
from memprof.analysis.plans.predict import Forecast, Side
from memprof.analysis.plans.suggest import Suggestion, describe_least
from memprof.analysis.plans.verify import Verification
from memprof.analysis.table import (
    BYTES,
    BYTES_CHANGE,
    FIGURE,
    NUMBER,
    RATIO_CHANGE,
    SIZES,
    TEXT,
    US,
    Cell,
    Column,
    FactTable,
    record,
    records,
    row_of,
    shown,
)
from memprof.json_values import Json, number, to_json
from memprof.phases import in_order
from memprof.policies.plan.plan import Plan
from memprof.trace.schema import CATEGORIES as ALL_CATEGORIES
from memprof.units import format_bytes, format_bytes_change, format_percent_change, format_us, format_us_change


def compared_columns(kind: str) -> tuple[Column, ...]:
    """Returns the columns of predicted and measured bytes.

    Args:
        kind: ``phase`` or ``category``, what the bytes are of.
    """
    return (
        Column(kind, None, TEXT, attrgetter("name")),
        shown(kind, TEXT, lambda row: _named(kind, row.name), key="name"),
        Column("predicted_bytes", "predicted", BYTES),
        Column("measured_bytes", "measured", BYTES),
        Column("error_bytes", "error", BYTES_CHANGE),
        shown(
            "of measured",
            RATIO_CHANGE,
            lambda row: row.error_bytes / row.measured_bytes if row.measured_bytes else None,
        ),
    )


PHASES, CATEGORIES = compared_columns("phase"), compared_columns("category")


def _named(kind: str, name: str) -> Cell:
    return Cell(name, category=name if kind == "category" else "")


def changes(kind: str, before: Side, after: Side) -> FactTable:
    """Returns recorded and predicted bytes; of categories, the last row is the total.

    Args:
        kind: ``phase`` or ``category``, what the bytes are of.
        before: The recorded step.
        after: The predicted step.
    """
    columns = (
        shown(kind, TEXT, lambda row: _named(kind, row[0]), key="name"),
        shown("recorded", BYTES, lambda row: row[1]),
        shown("predicted", BYTES, lambda row: row[2]),
        shown("change", BYTES_CHANGE, lambda row: row[2] - row[1]),
    )
    if kind == "phase":
        old, new = ({name: one.allocated_bytes for name, one in side.phases.items()} for side in (before, after))
        first = tuple(in_order((*old, *new)))
    else:
        old, new, first = before.categories, after.categories, ALL_CATEGORIES
    names = [*first, *sorted({*old, *new} - set(first))]
    rows = [(name, old.get(name, 0), new.get(name, 0)) for name in names if old.get(name) or new.get(name)]
    table = FactTable(columns, rows)
    if kind == "category":
        sums = sum(old.values()), sum(new.values())
        table.add("total", name=Cell("total"), recorded=sums[0], predicted=sums[1], change=sums[1] - sums[0])
    return table


def counters(peaks: Iterable[int], times_us: Iterable[float], phases: Iterable[str] = ()) -> FactTable:
    """Returns the predicted and measured peak and step time."""
    (peak, was), (time_us, was_us) = peaks, times_us
    rows = (
        ("peak allocated", format_bytes(peak), format_bytes(was), format_bytes_change(peak - was), peak, was),
        ("step time", format_us(time_us), format_us(was_us), format_us_change(time_us - was_us), time_us, was_us),
    )
    where = ", measured ".join(dict.fromkeys(phases))
    columns = (
        shown("counter", TEXT, lambda row: row[0]),
        shown("predicted", FIGURE, lambda row: row[1]),
        shown("measured", FIGURE, lambda row: row[2]),
        shown("error", FIGURE, lambda row: row[3]),
        shown("of measured", FIGURE, lambda row: describe_error(*row[4:])),
        shown("peak in", TEXT, lambda row: where if row is rows[0] else "", is_optional=True),
    )
    return FactTable(columns, rows)


def describe_error(predicted: float, measured: float) -> str:
    """Returns an error as a share of what was measured: ``+1.2 %``, ``exact``; "" where it is unknown."""
    if not (measured and math.isfinite(measured) and math.isfinite(predicted)):
        return ""
    return "exact" if predicted == measured else format_percent_change(predicted / measured - 1)


#: Schema version; incremented when a key changes meaning or is removed.
PLAN_SCHEMA = 1
_MOMENTS = (
    Column("op_id", None, NUMBER),
    Column("op", None),
    Column("module", None),
    Column("source", None, TEXT, lambda moment: moment.source and moment.source.place),
)
#: A recorded and a predicted step.
SIDES = (
    Column("peak_allocated_bytes", None, BYTES, attrgetter("peak.allocated_bytes")),
    Column("peak_reserved_bytes", None, BYTES, attrgetter("reserved_bytes")),
    Column("peak_phase", None, TEXT, attrgetter("peak.phase")),
    Column("peak", None, row_of(_MOMENTS)),
    Column("step_time_us", None, US),
    Column("phases", None, SIZES, lambda side: {name: one.allocated_bytes for name, one in side.phases.items()}),
    Column("categories", None, SIZES, lambda side: {name: size for name, size in side.categories.items() if size}),
)


def forecast_to_json(made: Forecast) -> Json:
    """Returns a prediction ready for ``json.dump``."""
    budget = made.plan.budget_bytes
    return {
        "schema": PLAN_SCHEMA,
        "trace": made.trace,
        "step": made.step.number,
        "batch": made.basis.batch,
        "length": made.basis.length,
        "lengths": None if made.basis.mix is None else made.basis.mix.to_json(),
        "how": made.plan.source if made.plan.prediction is None else made.plan.prediction.how,
        "recorded": record(SIDES, made.recorded),
        "predicted": record(SIDES, made.predicted),
        "peak_interval_bytes": _interval(made.plan),
        "step_time_interval_us": _time_interval(made.plan),
        "change": {
            "peak_bytes": made.predicted.peak.allocated_bytes - made.recorded.peak.allocated_bytes,
            "peak_ratio": _ratio(made.predicted.peak.allocated_bytes, made.recorded.peak.allocated_bytes),
            "time_ratio": _ratio(made.predicted.step_time_us, made.recorded.step_time_us),
        },
        "budget_bytes": budget,
        "fits": None if budget is None else made.predicted.peak.allocated_bytes <= budget,
        "policies": records(STAGES, made.stages),
        "warnings": list(made.warnings),
    }


def _interval(plan: Plan) -> list[int] | None:
    return None if plan.interval is None else plan.interval.bounds


def _time_interval(plan: Plan) -> list[float] | None:
    return None if plan.time_interval is None else plan.time_interval.bounds


def suggestion_to_json(found: Suggestion, checked: tuple[Checked, ...] | None = None) -> Json:
    """Returns a suggestion ready for ``json.dump``.

    Args:
        found: The search result.
        checked: Its plans that were dry-run, None where no dry run was requested.
    """
    answer = found.answer
    fitting, others = rows_of_search(found)
    return {
        "schema": PLAN_SCHEMA,
        "trace": found.trace,
        "step": found.basis.step.number,
        "batch": found.basis.batch,
        "length": found.basis.length,
        "lengths": None if found.basis.mix is None else found.basis.mix.to_json(),
        "machine": found.basis.machine or None,
        "times": "" if found.basis.elsewhere is None else found.basis.elsewhere.how,
        "budget_bytes": answer.search_request.budget_bytes,
        "host_budget_bytes": answer.search_request.most_host_bytes,
        "host_used_bytes": answer.search_request.host_used_bytes or None,
        "unified": answer.search_request.is_unified,
        "recorded": {
            "peak_allocated_bytes": answer.recorded.peak_bytes,
            "peak_phase": answer.recorded.peak_phase,
            "step_time_us": answer.recorded.step_time_us,
        },
        "minimum_feasible_bytes": answer.search_request.needed(answer.least),
        "plans": records(PLANS, (*fitting, *others)),
        "checked": None if checked is None else records(CHECKED, checked),
        "refused": records(REFUSED, answer.refused),
        "reason": "" if answer.best is not None else describe_least(found),
        "is_complete": not answer.was_stopped,
        "replayed_plans": answer.tried,
        "warnings": list(found.warnings),
    }


def verification_to_json(found: Verification) -> Json:
    """Returns a comparison ready for ``json.dump``."""
    return {
        "schema": PLAN_SCHEMA,
        "predicted": to_json(found.predicted),
        "measured": to_json(found.measured),
        "peak_interval_bytes": _interval(found.plan),
        "step_time_interval_us": _time_interval(found.plan),
        "error": {
            "peak_bytes": found.peak_error_bytes,
            "peak_ratio": number(found.peak_error_ratio),
            "time_ratio": number(found.time_error_ratio),
        },
        **(NO_BUDGET if found.budget is None else found.budget.to_json()),
        "phases": records(PHASES, found.phases),
        "categories": records(CATEGORIES, found.categories),
        "policies": records(POLICIES, plan_policies(found.plan)),
        "warnings": list(found.warnings),
        "unlike": found.unlike or None,
    }


def plan_policies(plan: Plan) -> list[PolicyRow]:
    """Returns a plan's policies with their effects as predicted."""
    return [policy_row(policy, plan.numerics_of(policy), policy.source) for policy in plan.policies]


def _ratio(after: float, before: float) -> float | None:
    return number(after / before - 1) if before else None
