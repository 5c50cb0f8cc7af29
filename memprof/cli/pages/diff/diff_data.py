"""A diff for programs: JSON containers, and a JUnit report with one test case per gate."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

from memprof.analysis.diff.comparison import Diff, Pair
from memprof.analysis.diff.diff_tables import CHANGES
from memprof.analysis.diff.diff_words import headline
from memprof.analysis.diff.explain import explain, modules_of
from memprof.analysis.diff.summary import Spot, Summary
from memprof.analysis.table import records
from memprof.json_values import Json, number, to_json

#: Characters that are invalid in XML 1.0.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
#: Schema version; incremented when a key changes meaning or is removed.
DIFF_SCHEMA = 1


def diff_to_junit(found: Diff) -> str:
    """Returns the gates of a diff as JUnit XML; a gate that only warns passes, with the warning as its output."""
    verdicts = found.verdicts
    failures = sum(level == "fail" and verdict.is_failed for level, verdict in verdicts)
    skipped = sum(not verdict.is_known for _, verdict in verdicts)
    counts = {"tests": str(len(verdicts)), "failures": str(failures), "skipped": str(skipped), "errors": "0"}
    suite = ET.Element("testsuite", {"name": "memprof", **counts})
    for level, verdict in verdicts:
        case = ET.SubElement(suite, "testcase", {"classname": "memprof.gates", "name": _sound(verdict.gate.text)})
        words = _sound(verdict.describe())
        if not verdict.is_known:
            ET.SubElement(case, "skipped", {"message": words})
        elif verdict.is_failed and level == "fail":
            ET.SubElement(case, "failure", {"message": words}).text = _sound(headline(found))
        else:
            ET.SubElement(case, "system-out").text = f"warning: {words}" if verdict.is_failed else words
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _sound(text: str) -> str:
    return _FORBIDDEN.sub("?", text)


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
            kind: records(CHANGES, (one for one in changes if one.bytes)) for kind, changes in pair.parts.items()
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
