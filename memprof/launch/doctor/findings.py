"""What an examination of the environment found, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Version of the JSON below.
SCHEMA = 1

#: ok: as it should be. note: good to know. missing: an optional thing that is not there. fix: something does not work.
#: fail: nothing can be recorded as long as this is so.
OK, NOTE, MISSING, FIX, FAIL = LEVELS = ("ok", "note", "missing", "fix", "fail")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: One of LEVELS.
        what: What was looked at, in a word or two.
        says: What was found, a clause.
        advice: What to do about it, a sentence; "" where nothing needs to be done.
    """

    level: str
    what: str
    says: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        """Returns it as JSON containers."""
        return {"level": self.level, "what": self.what, "says": self.says, "advice": self.advice}


@dataclass(frozen=True)
class Section:
    """Findings about one thing.

    Attributes:
        name: What they are about.
        findings: What was found, in the order to show it.
    """

    name: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Examination:
    """Everything that was found.

    Attributes:
        sections: By what it is about.
        is_quick: Nothing was recorded to try it.
        facts: Versions and places, for JSON.
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
        """Whether a job can be recorded here, by all that was looked at."""
        return all(finding.level != FAIL for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON containers, ready for ``json.dump``."""
        return {
            "schema": SCHEMA,
            "works": self.works,
            "quick": self.is_quick,
            **self.facts,
            "sections": [
                {"name": section.name, "findings": [finding.to_json() for finding in section.findings]}
                for section in self.sections
            ],
        }
