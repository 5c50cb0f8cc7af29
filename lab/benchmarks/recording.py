"""Runs scripts as they are and under ``memprof record``, for all benchmarks alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "sample_traces"
JOBS = Path(__file__).parent / "jobs"


@dataclass(frozen=True)
class Job:
    """A script and its arguments."""

    script: Path
    arguments: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The command that runs it as it is."""
        return [sys.executable, str(self.script), *self.arguments]

    def recorded(self, output: Path, *, skip: int = 2, steps: int = 3) -> list[str]:
        """Returns the command that records it."""
        return self._recorded(output, "--skip", str(skip), "--steps", str(steps))

    def followed(self, output: Path) -> list[str]:
        """Returns the command that records it in the default window, and larger steps after that."""
        return self._recorded(output)

    def _recorded(self, output: Path, *window: str) -> list[str]:
        record = ["record", "-q", "-f", "-o", str(output), *window]
        return [sys.executable, "-m", "memprof.cli.main", *record, str(self.script), *self.arguments]


def sample(name: str, *arguments: str) -> Job:
    """Returns the sample of a name, with arguments."""
    return Job(SAMPLES / name / "train.py", arguments)


def environment(**changes: str) -> dict[str, str]:
    """Returns the environment of every process measured."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MEMPROF_")}
    return {**inherited, "KINETO_LOG_LEVEL": "9", **changes}


def run(command: Sequence[str], folder: Path, **changes: str) -> subprocess.CompletedProcess[bytes]:
    """Runs a command to its end and returns the result.

    Raises:
        RuntimeError: It failed; the message holds the end of its stderr.
    """
    done = subprocess.run(command, cwd=folder, env=environment(**changes), capture_output=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:].decode()}")
    return done


def run_for_json(command: Sequence[str], folder: Path, **changes: str) -> Any:
    """Runs a command to its end and returns what its last line holds as JSON.

    Raises:
        RuntimeError: It failed; the message holds the end of its stderr.
    """
    return json.loads(run(command, folder, **changes).stdout.splitlines()[-1])
