"""The value that a gate checks, in one recording."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping

from memprof.analysis.diff.gates import Gate
from memprof.analysis.diff.summary import Spot, Summary


def measure(gate: Gate, summary: Summary, spot: Spot | None = None) -> float:
    """Returns the value a gate checks; NaN where a recording does not contain it.

    Args:
        gate: The gate.
        summary: The recording.
        spot: The moment at which modules are measured; the peak where left out.
    """
    if gate.kind == "phase":
        return float(summary.spots[gate.name].bytes) if gate.name in summary.spots else 0.0
    if gate.kind == "module":
        return float(_of_module(gate.name, (spot or summary.peak).parts["module"]))
    if gate.kind == "category" or gate.name in summary.maxima:
        return float(summary.maxima.get(gate.name, 0))
    if gate.name == "peak":
        return float(summary.peak.bytes)
    if gate.name == "step_time":
        return summary.step_time_us
    if gate.name == "recompute_time":
        return summary.recompute_time_us
    if gate.name == "growth":
        return summary.growth_bytes
    if gate.name in ("reserved", "reserved-allocated"):
        if summary.reserved_bytes < 0:
            return math.nan
        return float(summary.reserved_bytes - (summary.peak.bytes if gate.name == "reserved-allocated" else 0))
    return 0.0  # an empty category


def _of_module(pattern: str, modules: Mapping[str, int]) -> int:
    """Sums the modules that match a pattern, and their descendants."""
    return sum(
        size
        for name, size in modules.items()
        if fnmatch.fnmatchcase(name, pattern)
        or any(fnmatch.fnmatchcase(name[:place], pattern) for place, letter in enumerate(name) if letter == ".")
    )
