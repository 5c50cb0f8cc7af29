"""The ranks of a job side by side, as JSON containers: bytes, microseconds, stable keys."""

from __future__ import annotations

from memprof.analysis.ranks.rank_report import RankComparison
from memprof.analysis.ranks.stragglers import Stragglers
from memprof.json_values import Json, to_json

#: Version of the keys.
RANKS_SCHEMA = 1


def ranks_to_json(compared: RankComparison, stragglers: Stragglers, notes: tuple[str, ...]) -> Json:
    """Returns the output of `memprof report --by rank`.

    Args:
        compared: The ranks.
        stragglers: The stragglers.
        notes: What is missing from the job.
    """
    return {
        "schema": RANKS_SCHEMA,
        "worst_rank": compared.worst,
        "ranks": to_json(compared.ranks),
        **spreads_to_json(compared),
        **stragglers_to_json(stragglers),
        "notes": list(notes),
    }


def spreads_to_json(compared: RankComparison) -> Json:
    """Returns the spread over the ranks."""
    return {
        "peak_spread": to_json(compared.peak),
        "spread_by_phase": to_json(compared.phases),
        "spread_by_category": to_json(compared.categories),
        "spread_by_module": to_json(compared.modules),
    }


def stragglers_to_json(found: Stragglers) -> Json:
    """Returns the stragglers, and the accuracy of the clock alignment."""
    return {
        "stragglers": to_json(found.ranks),
        "late_collectives": to_json(found.collectives),
        "clocks": {
            "count": found.alignment.clocks,
            "offset_us": to_json(found.alignment.offset_us),
            "error_us": to_json(found.alignment.error_us),
        },
    }
