"""The allocator's and the static planner's reports as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from memprof.analysis.allocator.allocator_report import AllocatorReport, Pin
from memprof.analysis.allocator.static_report import StaticReport
from memprof.analysis.report.end_state import EndState
from memprof.replay.allocator.fragmentation import Fragmentation

#: Version of the keys below.
ALLOCATOR_SCHEMA = 1


def allocator_to_json(report: AllocatorReport) -> dict[str, Any]:
    """Returns the allocator's report: bytes, stable keys."""
    return {
        "schema": ALLOCATOR_SCHEMA,
        "has_history": True,
        "step": report.step,
        "device": report.device,
        "is_as_if_on_cuda": report.device == "cpu",
        "settings": report.settings,
        "reserved_peak_bytes": report.reserved_peak,
        "recorded_reserved_peak_bytes": report.recorded_reserved_peak,
        "allocated_peak_bytes": report.allocated_peak,
        "at_reserved_peak": _fragmentation(report.at_growth),
        "last_growth": {
            "requested_bytes": report.growth.requested,
            "free_bytes_before": report.growth.free_before,
            "largest_free_block_before_bytes": report.growth.largest_free_before,
            "for": _pin(report.growth.what),
        },
        "after_step": _fragmentation(report.at_end),
        "segments": [
            {
                "address": segment.use.address,
                "size_bytes": segment.use.size,
                "type": "small" if segment.use.is_small else "large",
                "is_expandable": segment.use.is_expandable,
                "free_bytes": segment.use.free_bytes,
                "largest_hole_bytes": segment.use.largest_hole,
                "holes": segment.use.holes,
                "blocks": segment.use.blocks,
                "largest_block": None if segment.pin is None else _pin(segment.pin),
            }
            for segment in report.segments
        ],
        "under_settings": [
            {
                "settings": one.name,
                "is_in_force": place == 0,
                "reserved_peak_bytes": one.reserved_peak,
                "allocated_peak_bytes": one.allocated_peak,
                "segments_taken": one.segments,
                "retries": one.retries,
                "failed_allocations": one.failed,
            }
            for place, one in enumerate(report.outcomes)
        ],
        "best_settings": None if report.best is None else report.best.name,
        "advice": report.advice,
    }


def static_to_json(report: StaticReport) -> dict[str, Any]:
    """Returns the static planner's report: bytes, stable keys."""
    return {
        "schema": ALLOCATOR_SCHEMA,
        "has_history": True,
        "step": report.step,
        "device": report.device,
        "storages": report.storages,
        "has_reads": report.has_reads,
        "total_bytes": report.total,
        "reserved_bytes": report.reserved,
        "allocated_bytes": report.allocated,
        "alive_bound_bytes": report.kept_bound,
        "needed_bound_bytes": report.bound,
        "greedy_by_size_bytes": report.greedy,
        "best_fit_bytes": report.best_fit,
        "in_place_bound_bytes": report.in_place_bound,
        "in_place_greedy_by_size_bytes": report.in_place_greedy,
        "in_place": [dataclasses.asdict(one) for one in report.in_place],
    }


def end_to_json(report: EndState) -> dict[str, Any]:
    """Returns the segments of a snapshot without a history: bytes, stable keys."""
    return {
        "schema": ALLOCATOR_SCHEMA,
        "has_history": False,
        "segments": report.segments,
        "reserved_bytes": report.reserved,
        "allocated_bytes": report.allocated,
        "requested_bytes": report.requested,
        "pending_bytes": report.pending,
        "idle_segments_bytes": report.idle,
        "holes_bytes": report.holes,
    }


def _fragmentation(one: Fragmentation) -> dict[str, int]:
    return {
        "reserved_bytes": one.reserved,
        "allocated_bytes": one.allocated,
        "requested_bytes": one.requested,
        "largest_free_block_bytes": one.largest_free,
        "idle_segments_bytes": one.idle_bytes,
        "holes_bytes": one.pinned_bytes,
    }


def _pin(one: Pin) -> dict[str, Any]:
    return {
        "requested_bytes": one.size,
        "category": one.category,
        "name": one.name,
        "module": one.module,
        "line": one.line,
    }
