"""The allocator's and the static planner's reports as JSON."""

from __future__ import annotations

from memprof.analysis.allocator.allocator_report import AllocatorReport
from memprof.analysis.allocator.static_report import StaticReport
from memprof.analysis.report.moments import EndState
from memprof.json_values import Json, to_json

#: Version of the keys below.
ALLOCATOR_SCHEMA = 1


def allocator_to_json(report: AllocatorReport) -> Json:
    """Returns the allocator's report: bytes, stable keys."""
    return {
        "schema": ALLOCATOR_SCHEMA,
        "has_history": True,
        "step": report.step,
        "device": report.device,
        "is_as_if_on_cuda": report.device == "cpu",
        **to_json(report),
        "under_settings": [
            {"settings": one.name, "is_in_force": place == 0, **to_json(one)}
            for place, one in enumerate(report.outcomes)
        ],
    }


def static_to_json(report: StaticReport) -> Json:
    """Returns the static planner's report: bytes, stable keys."""
    return {"schema": ALLOCATOR_SCHEMA, "has_history": True, **to_json(report)}


def end_to_json(report: EndState) -> Json:
    """Returns the segments of a snapshot without a history: bytes, stable keys."""
    found = to_json(report)
    # With a history, `segments` lists them.
    return {"schema": ALLOCATOR_SCHEMA, "has_history": False, "segment_count": found.pop("segments"), **found}
