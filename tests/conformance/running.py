"""Runs one program plain and under memprof, in any mode, and keeps everything observable of each run.

In a test that is not marked `cold`, both runs are forks of a process that has imported torch (tests/warm).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from memprof.errors import InconclusiveError
from tests.warm import client

SCRIPTS = Path(__file__).parent / "scripts"
#: Options of the window that a mode without one of its own records.
WINDOW = ("--skip", "1", "--steps", "2")
#: The modes of recording, each with its options.
MODES: Mapping[str, tuple[str, ...]] = {
    "record": WINDOW,
    "light": ("--light",),
    "dry-run": ("--dry-run", *WINDOW),
    "remat": ("--remat", "1GiB", *WINDOW),
}
#: Every step of a program that does many things in turn.
ALL_STEPS = ("--skip", "0", "--steps", "100000")
# -P: the job's folder must not be able to shadow memprof. It concerns the parent alone.
_MEMPROF = (sys.executable, "-P", "-m", "memprof.cli.main", "record", "-q")
TIMEOUT_S = 120
#: Where bash puts the first process substitution.
DESCRIPTOR = 63

#: What differs from one process to the next, whoever starts it.
_CHANCE = re.compile(
    rb"0x[0-9a-f]{6,}|(?<=\(pid\(s\) )[\d, ]+|(?<=\(pid )\d+"
    # Lines of torch's C++ side: when and in which process.
    rb"|(?<=\[W)\d+ [\d:.]+|(?<=USDT:)[\d-]+ [\d:]+ \d+:\d+"
)


#: What memprof prints where nothing was recorded of a job that ended with 0, even with --quiet.
_NOTHING = re.compile(rb"(?ms)^memprof: nothing was recorded: .*? \(it ended with status 0\)\.\r?\n")


@dataclass(frozen=True)
class Job:
    """What to run.

    Attributes:
        words: What to type after ``python`` or after ``memprof record``; a command where they start with ``--``.
        shell: A line for ``sh`` instead, in which ``{run}`` stands for ``python`` or ``memprof record``, ``{command}``
            for nothing or ``memprof record --``, and ``{python}`` for this Python.
        stdin: What to type into it.
        environment: Variables to set.
        descriptor: What to offer on ``DESCRIPTOR``, as a shell's process substitution does.
        programs: Folders whose content lies in the folder it runs in.
    """

    words: tuple[str, ...] = ()
    shell: str = ""
    stdin: bytes = b""
    environment: Mapping[str, str] = field(default_factory=dict)
    descriptor: bytes | None = None
    programs: tuple[Path, ...] = (SCRIPTS,)


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        returncode: Exit status, negative for a signal.
        stdout: What it printed.
        stderr: What it printed on stderr.
        files: Content of every file in its folder, by name; of compiled Python files only their names.
    """

    returncode: int
    stdout: bytes
    stderr: bytes
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Running:
    """A run in progress.

    Attributes:
        job: What runs.
        folder: Where it runs.
        process: Its first process.
        recording: Where memprof records it; None for a plain run.
    """

    job: Job
    folder: Path
    process: subprocess.Popen[bytes]
    recording: Path | None = None

    def finish(self, own_status: int = 0) -> Outcome:
        """Waits for its end, and that of all who hold its output.

        Args:
            own_status: The job's own exit status; if that is 0 and nothing was recorded, memprof ends with another.
        """
        try:
            stdout, stderr = self.process.communicate(self.job.stdin, timeout=TIMEOUT_S)
        finally:
            self.process.kill()
        is_unrecorded = self.recording is not None and not self.recording.exists()
        is_memprofs = is_unrecorded and self.process.returncode == InconclusiveError.exit_code
        returncode = own_status if is_memprofs else self.process.returncode
        clean = (_without_chance(text, self.folder) for text in (stdout, stderr))
        return Outcome(returncode, *clean, _files(self.folder))


#: What plain runs came to, by what ran.
_plain_runs: dict[str, Outcome] = {}


def start_plain(folder: Path, job: Job) -> Running:
    """Starts a job as it is, in a new folder."""
    if job.shell:
        line = job.shell.format(run=shlex.quote(sys.executable), command="", python=shlex.quote(sys.executable))
        return _start(folder, job, ("sh", "-c", line))
    return _start(folder, job, job.words[1:] if job.words[0] == "--" else (sys.executable, *job.words))


def start_under(folder: Path, job: Job, recording: Path, options: tuple[str, ...]) -> Running:
    """Starts a job under ``memprof record``, in a new folder.

    Args:
        folder: Where it runs.
        job: What to run.
        recording: Where to record; outside the folder, so that a job may remove or protect that.
        options: More options of ``memprof record``.
    """
    memprof = (*_MEMPROF, "-o", str(recording), *options)
    if job.shell:
        run = shlex.join(memprof)
        line = job.shell.format(run=run, command=f"{run} --", python=shlex.quote(sys.executable))
        return replace(_start(folder, job, ("sh", "-c", line)), recording=recording)
    return replace(_start(folder, job, (*memprof, *job.words)), recording=recording)


def run_both(folder: Path, job: Job, options: tuple[str, ...] = WINDOW) -> tuple[Outcome, Outcome]:
    """Runs a job recorded and, where no test of this process has yet, at the same time plain.

    Args:
        folder: An empty folder; the recording is ``run.memprof`` in it.
        job: What to run.
        options: More options of ``memprof record``.

    Returns:
        The plain run and the recorded one.
    """
    key = repr((job, client.variables()))
    plain = None if key in _plain_runs else start_plain(folder / "plain" / "job", job)
    under = start_under(folder / "recorded" / "job", job, folder / "run.memprof", options)
    if plain is not None:
        _plain_runs[key] = plain.finish()
    return _plain_runs[key], under.finish(_plain_runs[key].returncode)


def with_plain_run(name: str) -> pytest.MarkDecorator:
    """Marks tests that compare with the same plain run: they run in one process, which runs it once."""
    return pytest.mark.xdist_group(f"plain {name}")


def command(*words: str) -> tuple[str, ...]:
    """Makes a command line of this Python's."""
    return ("--", sys.executable, *words)


def _start(folder: Path, job: Job, arguments: tuple[str, ...]) -> Running:
    for programs in job.programs:
        shutil.copytree(programs, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("MEMPROF_", "PYTHON"))}
    if job.descriptor is not None:
        reading, writing = os.pipe()
        os.write(writing, job.descriptor)
        os.close(writing)
        os.dup2(reading, DESCRIPTOR)
        os.close(reading)
    process = subprocess.Popen(
        arguments,
        cwd=folder,
        # Kineto's chatter on stderr is silenced in recorded jobs, on purpose (docs/record.md).
        env={**variables, **client.variables(), "KINETO_LOG_LEVEL": "9", "PYTHONHASHSEED": "0", **job.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=() if job.descriptor is None else (DESCRIPTOR,),
        # As from an interactive shell, and so that a script may signal its process group.
        start_new_session=True,
    )
    if job.descriptor is not None:
        os.close(DESCRIPTOR)
    return Running(job, folder, process)


def _without_chance(text: bytes, folder: Path) -> bytes:
    """Removes what differs by chance, and that nothing was recorded, wherever the job's streams lead."""
    return _CHANCE.sub(b"<chance>", _NOTHING.sub(b"", text).replace(bytes(folder), b"<folder>"))


def _files(folder: Path) -> dict[str, bytes]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {_name(path, folder): b"" if path.suffix == ".pyc" else _content(path, folder) for path in files}


def _name(path: Path, folder: Path) -> str:
    # Compiled files may lie under the whole path of what they were compiled from.
    return str(path.relative_to(folder)).replace(str(folder).lstrip("/"), "<folder>")


def _content(path: Path, folder: Path) -> bytes:
    return _without_chance(path.read_bytes(), folder)
