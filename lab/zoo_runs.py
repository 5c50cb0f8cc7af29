"""Runs each script of the zoo in three ways at once: plain, recorded, and with the allocator's log."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from lab.zoo_catalog import Case
from tests import truth

_TIME_LIMIT_S = 240
#: The moment and the process id with which torch begins a warning.
_STAMP = re.compile(rb"^\[([WIE])\d{4} [\d:.]+ ", re.MULTILINE)


@dataclass(frozen=True)
class Output:
    """What a run left."""

    returncode: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True)
class Runs:
    """The three runs of one script.

    Attributes:
        plain: The script as it is.
        recorded: The script under ``memprof record``.
        trace: The recording; the file may be missing.
        truth: What the allocator counted in a third process.
    """

    plain: Output
    recorded: Output
    trace: Path
    truth: truth.Truth


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment of all three runs.

    One thread, so that sums are added in one order; no lines of Kineto's, which carry the time of day; a compiler
    cache of our own.
    """
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("MEMPROF_")},
        "OMP_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "9",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def runs_of(case: Case, folder: Path) -> Runs:
    """Runs a script in the three ways, or returns what another test, in whichever process, has found already.

    Args:
        case: The script.
        folder: Where results are kept, shared by all the tests of a session.
    """
    home = folder / case.name
    home.mkdir(parents=True, exist_ok=True)
    kept = home / "runs.pickle"
    with FileLock(home / "lock"):
        if not kept.exists():
            kept.write_bytes(pickle.dumps(_run(case, folder, home)))
        found: Runs = pickle.loads(kept.read_bytes())
    return found


def _run(case: Case, folder: Path, home: Path) -> Runs:
    trace = home / "run.memprof"
    python = [sys.executable]
    record = [*python, "-m", "memprof.cli.main", "record", "-q", "-f", "-o", str(trace)]
    command = [str(case.path), *case.arguments]
    settings = environment(folder)
    with ThreadPoolExecutor() as pool:
        plain = pool.submit(_output, [*python, *command], home, settings, case.noise)
        recorded = pool.submit(_output, [*record, *command], home, settings, case.noise)
        counted = pool.submit(truth.measure, case.path, case.arguments, settings, mark=case.cut)
        return Runs(plain.result(), recorded.result(), trace, counted.result())


def _output(command: list[str], folder: Path, settings: dict[str, str], noise: str) -> Output:
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, timeout=_TIME_LIMIT_S)
    stderr = _STAMP.sub(rb"[\1 ", done.stderr)
    if noise:
        stderr = b"".join(line for line in stderr.splitlines(keepends=True) if noise.encode() not in line)
    return Output(done.returncode, done.stdout, stderr)
