"""Runs one program twice, plain and under ``memprof record``, and keeps everything that can be seen of each run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
WINDOW = ("--skip", "1", "--steps", "2")
# -P: the job's folder must not be able to shadow memprof. It concerns the parent alone.
MEMPROF = (sys.executable, "-P", "-m", "memprof.cli.main", "record", "-q", "-o", "run.memprof", *WINDOW)
TIMEOUT_S = 120
#: Where bash puts the first process substitution.
DESCRIPTOR = 63

#: What differs from one process to the next, whoever starts it.
_CHANCE = re.compile(rb"0x[0-9a-f]{6,}|(?<=\(pid\(s\) )[\d, ]+|(?<=\(pid )\d+")


@dataclass(frozen=True)
class Outcome:
    """What a run left.

    Attributes:
        returncode: Exit status, negative for a signal.
        stdout: What it printed.
        stderr: What it printed on stderr.
        files: Content of every file in its folder, by name; of compiled Python files only that they are there.
    """

    returncode: int
    stdout: bytes
    stderr: bytes
    files: Mapping[str, bytes]


def run_both(
    folder: Path,
    words: tuple[str, ...],
    *,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
    descriptor: bytes | None = None,
) -> tuple[Outcome, Outcome]:
    """Runs a program plain and recorded, at the same time, each in a copy of the scripts folder.

    Args:
        folder: An empty folder.
        words: What to type after ``python`` or after ``memprof record``; a command where they start with ``--``.
        stdin: What to type into it.
        environment: Variables to set for both.
        descriptor: What to offer on ``DESCRIPTOR``, as a shell's process substitution does.

    Returns:
        The plain run and the recorded one.
    """
    started = [
        _start(folder / name, command, environment or {}, descriptor)
        for name, command in (("plain", _plain(words)), ("recorded", (*MEMPROF, *words)))
    ]
    plain, recorded = (_finish(folder / name, *processes, stdin) for name, processes in started)
    return plain, recorded


def _plain(words: tuple[str, ...]) -> tuple[str, ...]:
    return words[1:] if words[0] == "--" else (sys.executable, *words)


def command(*words: str) -> tuple[str, ...]:
    """Makes a command line of this Python's."""
    return ("--", sys.executable, *words)


def _start(
    folder: Path, command: tuple[str, ...], environment: Mapping[str, str], descriptor: bytes | None
) -> tuple[str, tuple[subprocess.Popen[bytes]]]:
    shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("MEMPROF_", "PYTHON"))}
    if descriptor is not None:
        reading, writing = os.pipe()
        os.write(writing, descriptor)
        os.close(writing)
        os.dup2(reading, DESCRIPTOR)
        os.close(reading)
    process = subprocess.Popen(
        command,
        cwd=folder,
        # Kineto's chatter on stderr is silenced in recorded jobs, on purpose (docs/record.md).
        env={**variables, "KINETO_LOG_LEVEL": "9", "PYTHONHASHSEED": "0", **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=() if descriptor is None else (DESCRIPTOR,),
        # As from an interactive shell, and so that a script may signal its process group.
        start_new_session=True,
    )
    if descriptor is not None:
        os.close(DESCRIPTOR)
    return folder.name, (process,)


def _finish(folder: Path, process: subprocess.Popen[bytes], stdin: bytes) -> Outcome:
    try:
        stdout, stderr = process.communicate(stdin, timeout=TIMEOUT_S)
    finally:
        process.kill()
    return Outcome(process.returncode, _without_chance(stdout, folder), _without_chance(stderr, folder), _files(folder))


def _without_chance(text: bytes, folder: Path) -> bytes:
    return _CHANCE.sub(b"<chance>", text.replace(bytes(folder), b"<folder>"))


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): b"" if path.suffix == ".pyc" else _without_chance(path.read_bytes(), folder)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "run.memprof"
    }
