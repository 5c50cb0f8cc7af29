"""Diffs as JSON containers: stable keys, bytes and microseconds as numbers. See ``docs/diff.md``."""

from __future__ import annotations

import math

from memprof.analysis.diff.comparison import Diff, Pair
from memprof.analysis.diff.explain import explain, modules_of
from memprof.analysis.diff.summary import Spot, Summary
from memprof.json_values import Json, number, to_json

#: Schema version; incremented when a key changes meaning or is removed.
DIFF_SCHEMA = 1


def diff_to_json(found: Diff, names: tuple[str, str]) -> Json:
    """Returns a diff ready for ``json.dump``.

    Args:
        found: The diff.
        names: Names of the two sides.
    """
    return {
        "schema": DIFF_SCHEMA,
        "base": _side(found.base, names[0], len(found.bases)),
        "head": _side(found.head, names[1], len(found.heads)),
        "is_unchanged": found.is_unchanged,
        "is_failed": found.is_failed,
        "peak": _pair(found.peak),
        "phases": [_pair(pair) for pair in found.phases],
        "told_in": found.focus.name,
        "differences": to_json(found.differences),
        "gates": [
            {
                "gate": verdict.gate.text,
                "level": level,
                "base": number(verdict.base),
                "head": number(verdict.head),
                "is_known": verdict.is_known,
                "is_failed": verdict.is_failed,
                "sentence": verdict.describe(),
            }
            for level, verdict in found.verdicts
        ],
        "causes": [{"kind": cause.kind, "sentence": cause.sentence} for cause in explain(found)],
        "modules": [{"name": one.name, "change_bytes": one.bytes} for one in modules_of(found)],
        "warnings": list(found.warnings),
    }


def diff_to_benchmark(found: Diff) -> list[Json]:
    """Returns the head's figures in the format of github-action-benchmark (``customSmallerIsBetter``)."""
    head = found.head
    figures = [{"name": "peak allocated", "unit": "bytes", "value": head.peak.bytes}]
    figures += [
        {"name": f"most in {name}", "unit": "bytes", "value": spot.bytes}
        for name, spot in head.spots.items()
        if name != "peak"
    ]
    if math.isfinite(head.step_time_us):
        figures.append({"name": "step time", "unit": "us", "value": round(head.step_time_us, 1)})
    return figures


def _side(summary: Summary, name: str, count: int) -> Json:
    return {
        "name": name,
        "recordings": count,
        "peak_allocated_bytes": summary.peak.bytes,
        "peak_in": summary.peak.place,
        "step_time_us": number(summary.step_time_us),
        "recompute_time_us": number(summary.recompute_time_us),
        "reserved_bytes": summary.reserved_bytes if summary.reserved_bytes >= 0 else None,
        "plan": summary.plan or None,
        "rank_peaks": summary.rank_peaks,
    }


def _pair(pair: Pair) -> Json:
    return {
        "name": pair.name,
        "base": _spot(pair.base),
        "head": _spot(pair.head),
        "change_bytes": pair.bytes,
        "change_ratio": pair.bytes / pair.base_bytes if pair.base_bytes else None,
        "parts": {
            kind: [
                {"name": one.name, "base_bytes": one.base, "head_bytes": one.head, "change_bytes": one.bytes}
                for one in changes
                if one.bytes
            ]
            for kind, changes in pair.parts.items()
        },
    }


def _spot(spot: Spot | None) -> Json | None:
    if spot is None:
        return None
    return {
        "bytes": spot.bytes,
        "phase": spot.phase,
        "module": spot.module or None,
        "operator": spot.op,
        "line": spot.line or None,
    }
