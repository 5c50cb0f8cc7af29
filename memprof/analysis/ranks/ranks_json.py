"""The ranks of a job side by side, as JSON containers: bytes, microseconds, stable keys."""

from __future__ import annotations

import math
from typing import Any

from memprof.analysis.ranks.rank_report import RankComparison, RankPeak, Spread
from memprof.analysis.ranks.stragglers import Stragglers

Json = dict[str, Any]


def ranks_to_json(compared: RankComparison, stragglers: Stragglers, notes: tuple[str, ...]) -> Json:
    """Returns the output of `memprof report --by rank`.

    Args:
        compared: The ranks.
        stragglers: The stragglers.
        notes: What is missing from the job.
    """
    return {
        "worst_rank": compared.worst,
        "ranks": [_rank(one) for one in compared.ranks],
        **spreads_to_json(compared),
        **stragglers_to_json(stragglers),
        "notes": list(notes),
    }


def spreads_to_json(compared: RankComparison) -> Json:
    """Returns the spread over the ranks."""
    return {
        "peak_spread": None if compared.peak is None else _spread(compared.peak),
        "spread_by_phase": [_spread(one) for one in compared.phases],
        "spread_by_category": [_spread(one) for one in compared.categories],
        "spread_by_module": [_spread(one) for one in compared.modules],
    }


def stragglers_to_json(found: Stragglers) -> Json:
    """Returns the stragglers, and the accuracy of the clock alignment."""
    return {
        "stragglers": [vars(one) for one in found.ranks],
        "late_collectives": [vars(one) for one in found.collectives],
        "clocks": {
            "count": found.alignment.clocks,
            "offset_us": {str(rank): offset for rank, offset in found.alignment.offset_us.items()},
            "error_us": {str(rank): _number(error) for rank, error in found.alignment.error_us.items()},
        },
    }


def _rank(one: RankPeak) -> Json:
    return {
        "rank": one.rank,
        "node": one.node or None,
        "device": one.device,
        "step": one.step,
        "peak_allocated_bytes": one.peak_bytes,
        "peak_reserved_bytes": one.reserved_bytes,
        "peak_op_id": one.op_id,
        "peak_phase": one.phase or None,
        "peak_op": one.op or None,
        "peak_module": one.module or None,
        "step_time_us": _number(one.step_time_us),
        "ends_early": one.ends_at or None,
    }


def _spread(one: Spread) -> Json:
    return {
        "name": one.name or None,
        "least_bytes": one.least,
        "median_bytes": one.median,
        "most_bytes": one.most,
        "least_rank": one.least_rank,
        "most_rank": one.most_rank,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
