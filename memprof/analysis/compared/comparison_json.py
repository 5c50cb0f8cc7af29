"""Compared allocations as JSON containers: bytes, stable keys."""

from __future__ import annotations

from memprof.analysis.compared.allocation_sequence import AllocationSequence
from memprof.analysis.compared.comparison import AllocationComparison, peak_allocation
from memprof.json_values import Json, to_json

#: Version of the keys.
COMPARISON_SCHEMA = 1


def comparison_to_json(compared: AllocationComparison) -> Json:
    """Returns the output of `memprof compare-allocations`."""
    return {
        "schema": COMPARISON_SCHEMA,
        "equal_in_order": compared.equal,
        "equal_in_any_order": compared.equal_in_any_order,
        "peak_error_bytes": compared.peak_error_bytes,
        "reserved_error_bytes": compared.reserved_error_bytes,
        "real": _side(compared.real),
        "dry_run": _side(compared.dry),
        "differences": to_json(compared.differences),
    }


def _side(sequence: AllocationSequence) -> Json:
    return {
        "source": sequence.source,
        "torch_version": sequence.torch,
        "allocations": len(sequence),
        "start_bytes": sequence.start_bytes,
        "peak_bytes": sequence.peak_bytes,
        "peak_at": peak_allocation(sequence),
        "end_bytes": sequence.end_bytes,
        "peak_reserved_bytes": sequence.peak_reserved_bytes if sequence.peak_reserved_bytes >= 0 else None,
        "end_reserved_bytes": sequence.end_reserved_bytes if sequence.end_reserved_bytes >= 0 else None,
        "segments": sequence.segments,
    }
