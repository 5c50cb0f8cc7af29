"""Suggestions as JSON containers: stable keys, bytes and microseconds as numbers."""

from __future__ import annotations

from memprof.analysis.plans.dry_check_results import Checked
from memprof.analysis.plans.plan_json import PLAN_SCHEMA
from memprof.analysis.plans.plan_rows import CHECKED, PLANS, REFUSED, rows_of_search
from memprof.analysis.plans.suggest import Suggestion, describe_least
from memprof.analysis.table import records
from memprof.json_values import Json


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
