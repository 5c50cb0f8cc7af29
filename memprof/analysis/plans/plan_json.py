"""Predictions and their verification as JSON containers: stable keys, bytes and microseconds as numbers."""

from __future__ import annotations

from memprof.analysis.diff.budget import NO_BUDGET
from memprof.analysis.plans.plan_rows import POLICIES, STAGES, PolicyRow, policy_row
from memprof.analysis.plans.predict import Forecast, Side
from memprof.analysis.plans.predicted_tables import CATEGORIES, PHASES
from memprof.analysis.plans.verify import Verification
from memprof.analysis.report.moments import Moment
from memprof.analysis.table import records
from memprof.json_values import Json, number, to_json
from memprof.policies.plan.plan import Plan

#: Schema version; incremented when a key changes meaning or is removed.
PLAN_SCHEMA = 1


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
        "recorded": _side(made.recorded),
        "predicted": _side(made.predicted),
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


def _side(side: Side) -> Json:
    return {
        "peak_allocated_bytes": side.peak.allocated_bytes,
        "peak_reserved_bytes": side.reserved_bytes,
        "peak_phase": side.peak.phase,
        "peak": _moment(side.peak),
        "step_time_us": number(side.step_time_us),
        "phases": {phase: moment.allocated_bytes for phase, moment in side.phases.items()},
        "categories": {name: size for name, size in side.categories.items() if size},
    }


def _moment(moment: Moment) -> Json:
    return {
        "op_id": moment.op_id,
        "op": moment.op,
        "module": moment.module,
        "source": moment.source.place if moment.source else None,
    }


def _ratio(after: float, before: float) -> float | None:
    return number(after / before - 1) if before else None
