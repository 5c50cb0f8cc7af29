"""Jobs under `memprof record` in their own processes, and the results."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from memprof.trace.step import Step
from memprof.trace.store import Trace


@dataclass(frozen=True)
class Ended:
    """How a job ended, and its trace, which may not be there."""

    returncode: int
    stdout: str
    stderr: str
    path: Path

    @cached_property
    def trace(self) -> Trace:
        """The recording."""
        assert self.returncode == 0, self.stderr
        return Trace.open(self.path)

    @cached_property
    def step(self) -> Step:
        """Its steady step."""
        step = self.trace.steady_step()
        step.check()
        return step

    @cached_property
    def peak(self) -> int:
        """Most bytes allocated in its steady step."""
        return int(self.step.memory.allocated_bytes.max())


def record(folder: Path, *words: str, name: str = "run.memprof") -> Ended:
    """Records a job in a folder, on one thread and under none of the session's settings."""
    path = folder / name
    done = subprocess.run(
        [sys.executable, "-P", "-m", "memprof.cli.main", "record", "-f", "-o", str(path), *words],
        cwd=folder,
        env={**{name: value for name, value in os.environ.items() if "MEMPROF" not in name}, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr, path)


def record_both(folder: Path, script: str) -> tuple[Ended, Ended]:
    """Records a script that trains on the processor, and its dry run."""
    real = record_script(folder, script, "--stop", name="real.memprof")
    return real, record_script(folder, script, "--dry-run", name="dry.memprof")


def record_script(
    folder: Path, script: str, *options: str, words: tuple[str, ...] = (), name: str = "run.memprof"
) -> Ended:
    """Records a script given by its text."""
    (folder / "job.py").write_text(script)
    return record(folder, *options, "job.py", *words, name=name)
