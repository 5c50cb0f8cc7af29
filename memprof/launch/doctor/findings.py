"""The results of examining the environment, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memprof.json_values import to_json

#: Version of the JSON format.
SCHEMA = 1

#: ok: as it should be. note: informational. missing: an optional component is not installed. fix: something does not
#: work. fail: recording is impossible until this is fixed.
OK, NOTE, MISSING, FIX, FAIL = "ok", "note", "missing", "fix", "fail"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        level: One of OK, NOTE, MISSING, FIX and FAIL.
        what: Subject of the check, one or two words.
        says: The result, a clause.
        advice: Suggested fix, a sentence; "" if none is needed.
    """

    level: str
    what: str
    says: str
    advice: str = ""


@dataclass(frozen=True)
class Section:
    """Findings on one subject.

    Attributes:
        name: The subject.
        findings: The findings, in display order.
    """

    name: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Examination:
    """All findings.

    Attributes:
        sections: The findings by subject.
        is_quick: The test recording was skipped.
        facts: Versions and paths, for JSON.
    """

    sections: tuple[Section, ...]
    is_quick: bool
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings."""
        return tuple(finding for section in self.sections for finding in section.findings)

    @property
    def works(self) -> bool:
        """Whether a job can be recorded here, according to all checks."""
        return all(finding.level != FAIL for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Returns the examination as JSON containers, ready for ``json.dump``."""
        return {
            "schema": SCHEMA,
            "works": self.works,
            "quick": self.is_quick,
            **self.facts,
            "sections": to_json(self.sections),
        }
