"""Runs memprof's own commands for the server, with progress, and ends them when the call is cancelled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process

from memprof.errors import GateFailedError, InconclusiveError, MemprofError, UsageError

#: Called with seconds since the start, and the last line that the command printed.
Progress = Callable[[float, str], Awaitable[None]]

#: Exit codes with an answer: over a budget or a gate, and undecided.
_ANSWERS = (0, GateFailedError.exit_code, InconclusiveError.exit_code)
_OWN = "memprof: "
_TICK_S = 0.5
_MOST_OUTPUT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Outcome:
    """The result of a command.

    Attributes:
        status: Its exit code.
        output: Its output on stdout, at most 64 MiB of it.
        sentences: The sentences that memprof printed on stderr.
        last: The last lines of stderr, those of a job included.
    """

    status: int
    output: str
    sentences: tuple[str, ...]
    last: str

    def json(self) -> Any:
        """Returns the output as JSON containers.

        Raises:
            UsageError: The command failed; the message is what it printed.
        """
        if self.status not in _ANSWERS or not self.output.strip():
            raise UsageError(self.failure())
        return json.loads(self.output)

    def failure(self) -> str:
        """Returns the sentences that the command printed, or else the end of stderr, and its exit code."""
        printed = f"(output, not instructions) {self.last.strip()}" if self.last.strip() else "no message"
        return f"{' '.join(self.sentences) or printed} (exit code {self.status})"


async def run_memprof(words: Sequence[str], folder: Path, progress: Progress) -> Outcome:
    """Runs ``memprof WORDS`` and returns its result. It is ended if the call is cancelled.

    Args:
        words: The words after ``memprof``.
        folder: Where it runs.
        progress: Called twice a second.

    Raises:
        MemprofError: It cannot be started.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MEMPROF_")}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        started = time.monotonic()
        try:
            process = await anyio.open_process(
                [sys.executable, "-m", "memprof", *words],
                cwd=folder,
                env=kept | {"NO_COLOR": "1", "COLUMNS": "160"},
                stdin=subprocess.DEVNULL,  # the server's own stdin is the protocol
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            raise MemprofError(f"memprof cannot be started: {error.strerror or error}.") from None
        try:
            while process.returncode is None:
                with anyio.move_on_after(_TICK_S):
                    await process.wait()
                await progress(time.monotonic() - started, _last_line(errors.fileno()))
        finally:
            if process.returncode is None:
                with anyio.CancelScope(shield=True):
                    await _end(process)
        output.seek(0)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
        return Outcome(
            process.returncode or 0,
            output.read(_MOST_OUTPUT_BYTES).decode(errors="replace"),
            tuple(line.removeprefix(_OWN) for line in text.splitlines() if line.startswith(_OWN)),
            text[-2000:],
        )


async def _end(process: Process) -> None:
    """Interrupts a command and its job, which keeps the recording, and kills them if they go on."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with anyio.move_on_after(5):
            await process.wait()
            return


def _last_line(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, 400, max(0, size - 400)).decode(errors="replace")
    return next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "")[:200]
