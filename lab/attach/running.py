"""Runs a job while something attaches to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path

import memprof.cli.pages.attach_page
import memprof.launch.attach.dump
import memprof.launch.attach.recording  # noqa: F401 - imported here for all processes that attach
from lab.attach.kinds import Kind
from lab.zoo_runs import environment
from memprof.cli.main import main

MODES = ("nothing", "dump", "record", "light", "detach", "killed")
_START_S, _ATTACH_S, _END_S = 600.0, 300.0, 600.0
_FORK = get_context("fork")
_GIVEN = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
#: How long the attaching command records before it is interrupted or killed.
_HELD_S = {"detach": 1.5, "killed": 0.8}
#: The moment and the process id with which torch begins a warning, and addresses.
_STAMP = re.compile(rb"^\[([WIE])\d{4} [\d:.]+ |(?<=pid)[ =:]*\d+|0x[0-9a-f]{6,}", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What a job and the command that attached to it left.

    Attributes:
        status: The job's exit status; -1000 where it had to be killed.
        stdout: What the job printed.
        stderr: The same of its errors, without times of day.
        attach_status: The attaching command's exit status, None where it ran for too long, 0 where there was none.
        attach_text: What that command printed.
        seconds: How long it took.
    """

    status: int
    stdout: bytes
    stderr: bytes
    attach_status: int | None = 0
    attach_text: str = ""
    seconds: float = 0.0

    def differs_from(self, plain: Outcome) -> list[str]:
        """Lists what of the job differs from a run that nothing attached to."""
        return [name for name in ("status", "stdout", "stderr") if getattr(self, name) != getattr(plain, name)]


def run(kind: Kind, mode: str, folder: Path, python: str = sys.executable) -> Outcome:
    """Runs a job in one of the modes; both have files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    ready, done = folder / "ready", folder / "done"
    settings = {
        **environment(folder.parent),
        "LAB_READY": str(ready),
        "LAB_DONE": str(done),
        "LAB_STEP": kind.step,
        **dict(kind.variables),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "programs"), *sys.path[:1], *_GIVEN]),
    }
    for path in (ready, done):
        path.unlink(missing_ok=True)
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        job = subprocess.Popen(
            kind.command(python, folder), cwd=folder, env=settings, stdout=out, stderr=err, stdin=subprocess.DEVNULL
        )
        try:
            _wait_for(ready, job)
            if mode == "nothing" or not ready.exists():
                done.touch()
                attached = (0, "", 0.0)
            else:
                attached = _attach(int(ready.read_text()), mode, folder, done)
            status = _end_of(job)
        finally:
            if job.poll() is None:
                job.kill()
    stderr = _STAMP.sub(rb"[\1 ", (folder / "stderr").read_bytes())
    if kind.noise:
        stderr = b"".join(each for each in stderr.splitlines(True) if not re.search(kind.noise.encode(), each))
    return Outcome(status, (folder / "stdout").read_bytes(), stderr.replace(str(folder).encode(), b"."), *attached)


def _attach(pid: int, mode: str, folder: Path, done: Path) -> tuple[int | None, str, float]:
    trace = str(folder / "attached.memprof")
    options = {
        "dump": ["--dump"],
        "record": ["-f", "-o", trace, "--steps", "2"],
    }.get(mode, ["-f", "-o", trace, "--light"])
    began, text = time.monotonic(), folder / "attach.txt"
    text.write_bytes(b"")
    attach = attached(["attach", str(pid), *options], text)
    if mode in _HELD_S:
        _wait_for_text(text, attach)
        time.sleep(_HELD_S[mode])
        with suppress(ProcessLookupError):
            os.kill(attach.pid or 0, signal.SIGINT if mode == "detach" else signal.SIGKILL)
    elif mode == "light":
        _wait_for_text(text, attach)
        time.sleep(1.5)
        done.touch()
    attach.join(_ATTACH_S)
    status = attach.exitcode
    attach.kill()
    attach.join()
    done.touch()
    return status, text.read_text(errors="replace"), time.monotonic() - began


def attached(words: list[str], output: Path) -> ForkProcess:
    """Starts `memprof` with some arguments as a fork of this process, which has it imported already."""
    process = _FORK.Process(target=_run_here, args=(words, output))
    process.start()
    return process


def _run_here(words: list[str], output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    status = main(words)
    sys.stdout.flush()
    os._exit(status)


def _wait_for(ready: Path, job: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while not ready.exists() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def _wait_for_text(path: Path, attach: ForkProcess) -> None:
    """Waits until the attaching command says that it records, or ends."""
    deadline = time.monotonic() + _ATTACH_S
    while "recording" not in path.read_text(errors="replace") and attach.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)


def _end_of(job: subprocess.Popen[bytes]) -> int:
    try:
        return job.wait(_END_S)
    except subprocess.TimeoutExpired:
        return -1000
