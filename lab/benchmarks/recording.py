"""Runs scripts, as they are and under ``memprof record``, and other commands, for all benchmarks alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.replay.live import live_bytes
from memprof.trace.step import Step

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "sample_traces"
JOBS = Path(__file__).parent / "jobs"
MEMPROF = (sys.executable, "-m", "memprof.cli.main")
#: Of the environment of a job: results and times that do not depend on the number of cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
#: A process of its own, so that peaks of memory do not mix. getrusage's peak is that of the process that started this
#: one, where that was larger.
_MEASURED = """
import json, sys, time
{before}
start = time.{clock}()
{program}
took = time.{clock}() - start
held = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print()
print(json.dumps([took, int(held.split()[1]) * 1024]))
"""


@dataclass(frozen=True)
class Job:
    """A script and its arguments."""

    script: Path
    arguments: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The command that runs it as it is."""
        return [sys.executable, str(self.script), *self.arguments]

    def recorded(self, output: Path, *options: str, skip: int = 2, steps: int = 3) -> list[str]:
        """Returns the command that records some of its steps."""
        return self.followed(output, *options, "--skip", str(skip), "--steps", str(steps))

    def followed(self, output: Path, *options: str) -> list[str]:
        """Returns the command that records it in the default window, and larger steps after that."""
        return [*MEMPROF, "record", "-q", "-f", "-o", str(output), *options, str(self.script), *self.arguments]


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


def reason_of(error: RuntimeError) -> str:
    """Returns the sentence in which memprof said why a command failed."""
    return str(error).strip().rpartition("memprof: ")[2]


def run_for_json(command: Sequence[str], folder: Path, **changes: str) -> Any:
    """Runs a command to its end and returns what its last line holds as JSON.

    Raises:
        RuntimeError: It failed; the message holds the end of its stderr.
    """
    return json.loads(run(command, folder, **changes).stdout.splitlines()[-1])


def ask(folder: Path, *words: str) -> Any:
    """Runs a command of memprof and returns what it prints as JSON.

    Raises:
        RuntimeError: It failed; the message holds the end of its stderr.
    """
    return json.loads(run([*MEMPROF, *words, "--json"], folder).stdout)


def run_under(plan: Path, job: Job, folder: Path, *, steps: int = 3) -> Any:
    """Records a job under a plan, and returns what `memprof verify` says of it."""
    head = folder / "head.memprof"
    run(job.recorded(head, "--plan", str(plan), steps=steps), folder, **ONE_THREAD)
    return ask(folder, "verify", str(plan), str(head))


def peak_bytes(step: Step) -> int:
    """Returns the most bytes that are live at once."""
    return int(live_bytes(step).during.max())


def measure_program(
    program: str, folder: Path, *arguments: object, before: str = "", clock: str = "perf_counter"
) -> tuple[float, float]:
    """Returns the seconds that a program takes, and the most resident memory of its process, in bytes.

    Args:
        program: Python code.
        folder: Where it runs.
        arguments: Of the process.
        before: Code that runs first and is not timed.
        clock: A function of ``time``.
    """
    code = _MEASURED.format(before=before, program=program, clock=clock)
    took, peak = run_for_json([sys.executable, "-c", code, *map(str, arguments)], folder)
    return took, peak


def imports_of(command: Sequence[str], folder: Path) -> dict[str, int]:
    """Returns the modules that a command of Python's imports, with the microseconds that each takes by itself."""
    told = run([command[0], "-X", "importtime", *command[1:]], folder).stderr.decode().splitlines()
    rows = [line.removeprefix("import time:").split("|") for line in told if line.startswith("import time:")]
    return {module.strip(): int(own) for own, _, module in rows if own.strip().isdigit()}
