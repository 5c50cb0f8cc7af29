"""A diff as a JUnit report: one test case per gate, for CI systems."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from memprof.analysis.diff.comparison import Diff
from memprof.cli.pages.diff.diff_words import headline

#: Characters that are invalid in XML 1.0.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


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
