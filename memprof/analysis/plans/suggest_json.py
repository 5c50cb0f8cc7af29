"""Suggestions as JSON containers: stable keys, bytes and microseconds as numbers."""

from __future__ import annotations

from memprof.analysis.plans.dry_check_results import Checked
from memprof.analysis.plans.plan_json import PLAN_SCHEMA, policy_to_json
from memprof.analysis.plans.suggest import Suggestion, describe_least
from memprof.json_values import Json
from memprof.planners.search.candidate import Candidate
from memprof.policies.plan.several_steps import sources_of


def suggestion_to_json(found: Suggestion, checked: tuple[Checked, ...] | None = None) -> Json:
    """Returns a suggestion ready for ``json.dump``.

    Args:
        found: The search result.
        checked: Its plans that were dry-run, None where no dry run was requested.
    """
    answer = found.answer
    fits = answer.best is not None
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
        "recorded": {
            "peak_allocated_bytes": answer.recorded.peak_bytes,
            "peak_phase": answer.recorded.peak_phase,
            "step_time_us": answer.recorded.step_time_us,
        },
        "minimum_feasible_bytes": answer.search_request.needed(answer.least),
        "plans": [
            *(
                {**_plan(one, found, fits=True), "peak_reserved_bytes": reserved, "host_bytes": host}
                for one, reserved, host in zip(found.plans, found.reserved, found.host_bytes, strict=True)
            ),
            *(
                {**_plan(one, found, fits=False), "peak_reserved_bytes": None, "host_bytes": None}
                for one in found.others
            ),
        ],
        "checked": None if checked is None else [_checked(one) for one in checked],
        "refused": [{"plan": plan, "reason": reason} for plan, reason in answer.refused],
        "reason": "" if fits else describe_least(found),
        "is_complete": not answer.was_stopped,
        "replayed_plans": answer.tried,
        "warnings": list(found.warnings),
    }


def _plan(one: Candidate, found: Suggestion, *, fits: bool) -> Json:
    recorded, sources = found.answer.recorded, sources_of(one.policies, found.basis.dry_steps)
    return {
        "fits": fits,
        "describe": one.plan.describe(),
        "peak_allocated_bytes": one.peak_bytes,
        "peak_interval_bytes": one.interval.bounds,
        "peak_phase": one.peak_phase,
        "peak_module": one.peak_module or None,
        "saved_bytes": recorded.peak_bytes - one.peak_bytes,
        "step_time_us": one.step_time_us,
        "step_time_interval_us": None if (times := found.time_interval(one)) is None else times.bounds,
        "slowdown": one.step_time_us / recorded.step_time_us - 1 if recorded.step_time_us else None,
        "how": found.source_of(one),
        "numerics": one.numerics,
        "changes": list(one.plan.caveats(found.basis.step)),
        "at_peak": one.categories,
        "policies": list(map(policy_to_json, one.policies, one.words, sources)),
    }


def _checked(one: Checked) -> Json:
    return {
        "describe": one.plan.describe(),
        "predicted_peak_allocated_bytes": one.predicted_bytes,
        "dry_run_peak_allocated_bytes": one.dry_bytes,
        "difference_bytes": one.difference_bytes,
        "difference_ratio": one.difference_ratio,
        "fits": one.fits,
        "reason": one.reason,
    }
