"""Arrangements as JSON: bytes, microseconds, stable keys."""

from __future__ import annotations

from typing import Any

from memprof.analysis.plans.arrangement_tables import ARRANGED, PROPOSALS
from memprof.analysis.plans.arrangements import Arrangements
from memprof.analysis.plans.plan_json import PLAN_SCHEMA
from memprof.analysis.table import record, records


def arrangements_to_json(found: Arrangements) -> dict[str, Any]:
    """Returns everything that the page shows, in bytes and microseconds."""
    question, balance, nearest = found.question, found.balance, found.search.nearest
    return {
        "schema": PLAN_SCHEMA,
        "devices": question.cluster.devices,
        "budget_bytes": question.budget_bytes,
        "global_samples": question.samples,
        "tried": found.search.tried,
        "was_stopped": found.search.was_stopped,
        "arrangements": records(PROPOSALS, found.proposals),
        "nearest": None if nearest is None else record(ARRANGED, nearest),
        "balance": balance and {name: record(ARRANGED, one) for name, one in vars(balance).items()},
        "assumptions": list(found.assumptions),
    }
