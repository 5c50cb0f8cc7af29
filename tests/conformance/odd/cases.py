"""The odd jobs: what to run, and how a plain run of each ends."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.running import SCRIPTS, Job

PROGRAMS = Path(__file__).parent / "programs"
_PYTHON = sys.executable


@dataclass(frozen=True)
class OddJob:
    name: str
    job: Job
    returncode: int = 0


def jobs(program: str, **statuses: int) -> list[OddJob]:
    return [
        OddJob(f"{program} {name}", Job((f"{program}.py", name), programs=(SCRIPTS, PROGRAMS)), status)
        for name, status in statuses.items()
    ]


def shell(name: str, line: str, returncode: int = 0, stdin: bytes = b"", **environment: str) -> OddJob:
    return OddJob(name, Job(shell=line, stdin=stdin, environment=environment, programs=(SCRIPTS, PROGRAMS)), returncode)
