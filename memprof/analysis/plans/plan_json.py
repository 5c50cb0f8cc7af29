"""Suggestions, predictions and their verification as JSON containers: stable keys, bytes and microseconds."""

from __future__ import annotations

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
from memprof.analysis.plans.predict import Forecast
from memprof.analysis.plans.predicted_tables import CATEGORIES, PHASES
from memprof.analysis.plans.suggest import Suggestion, describe_least
from memprof.analysis.plans.verify import Verification
from memprof.analysis.table import BYTES, NUMBER, SIZES, TEXT, US, Column, record, records, row_of
from memprof.json_values import Json, number, to_json
from memprof.policies.plan.plan import Plan

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
    """Returns the bounds of a plan's peak; None where unknown."""
    return None if plan.interval is None else plan.interval.bounds


def _time_interval(plan: Plan) -> list[float] | None:
    """Returns the bounds of a plan's step time; None where unknown."""
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
