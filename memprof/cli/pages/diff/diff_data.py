"""A diff for programs: JSON containers, and a JUnit report with one test case per gate."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from operator import attrgetter

from memprof.analysis.diff.comparison import Diff
from memprof.analysis.diff.diff_tables import CHANGES, headline
from memprof.analysis.diff.explain import explain, modules_of
from memprof.analysis.diff.summary import KINDS
from memprof.analysis.table import (
    BYTES,
    BYTES_CHANGE,
    COUNT,
    FRACTION,
    RATIO_CHANGE,
    SIZES,
    TRUTH,
    US,
    Column,
    Read,
    record,
    records,
    row_of,
    rows_of,
)
from memprof.json_values import Json, to_json

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


def _changed(kind: str) -> Read:
    return lambda parts: [one for one in parts[kind] if one.bytes]


#: A side: its summary, its name, and the number of its recordings.
SIDES = (
    Column("name", read=lambda side: side[1]),
    Column("recordings", None, COUNT, lambda side: side[2]),
    Column("peak_allocated_bytes", None, BYTES, lambda side: side[0].peak.bytes),
    Column("peak_in", read=lambda side: side[0].peak.place),
    Column("step_time_us", None, US, lambda side: side[0].step_time_us),
    Column("recompute_time_us", None, US, lambda side: side[0].recompute_time_us),
    Column("reserved_bytes", None, BYTES, lambda side: side[0].reserved_bytes if side[0].reserved_bytes >= 0 else None),
    Column("plan", read=lambda side: side[0].plan or None),
    Column("rank_peaks", None, SIZES, lambda side: side[0].rank_peaks),
)
_SPOT = (
    Column("bytes", None, BYTES),
    Column("phase"),
    Column("module", read=lambda spot: spot.module or None),
    Column("operator", read=attrgetter("op")),
    Column("line", read=lambda spot: spot.line or None),
)
PAIRS = (
    Column("name"),
    Column("base", None, row_of(_SPOT)),
    Column("head", None, row_of(_SPOT)),
    Column("change_bytes", None, BYTES_CHANGE, attrgetter("bytes")),
    Column("change_ratio", None, RATIO_CHANGE, lambda pair: pair.bytes / pair.base_bytes if pair.base_bytes else None),
    Column("parts", None, row_of(tuple(Column(kind, None, rows_of(CHANGES), _changed(kind)) for kind in KINDS))),
)
#: A gate's level and verdict.
GATES = (
    Column("gate", read=lambda one: one[1].gate.text),
    Column("level", read=lambda one: one[0]),
    Column("base", None, FRACTION, lambda one: one[1].base),
    Column("head", None, FRACTION, lambda one: one[1].head),
    Column("is_known", None, TRUTH, lambda one: one[1].is_known),
    Column("is_failed", None, TRUTH, lambda one: one[1].is_failed),
    Column("sentence", read=lambda one: one[1].describe()),
)
CAUSES = (Column("kind"), Column("sentence"))
MODULES = (Column("name"), Column("change_bytes", None, BYTES_CHANGE, attrgetter("bytes")))


def diff_to_json(found: Diff, names: tuple[str, str]) -> Json:
    """Returns a diff ready for ``json.dump``."""
    return {
        "schema": DIFF_SCHEMA,
        "base": record(SIDES, (found.base, names[0], len(found.bases))),
        "head": record(SIDES, (found.head, names[1], len(found.heads))),
        "is_unchanged": found.is_unchanged,
        "is_failed": found.is_failed,
        "peak": record(PAIRS, found.peak),
        "phases": records(PAIRS, found.phases),
        "told_in": found.focus.name,
        "differences": to_json(found.differences),
        "gates": records(GATES, found.verdicts),
        "causes": records(CAUSES, explain(found)),
        "modules": records(MODULES, modules_of(found)),
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
