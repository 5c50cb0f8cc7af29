"""Runs memprof's own commands for the server, and keeps their answers short enough for an agent."""

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
#: Longest answer, in bytes of UTF-8.
MOST_BYTES = 4096
#: A part with less room than this is named by its kind alone.
_LEAST_BYTES = 24


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


def encode(value: Any) -> str:
    """Returns a value as JSON, without blanks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def shortened(value: Any, most_bytes: int) -> Any:
    """Shortens a value until its JSON is within a limit.

    Of a list, the first entries are kept; of an object, every key as far as possible: the small parts whole, and the
    large ones sharing what is left.
    """
    if _size(value) <= most_bytes:
        return value
    short: Any = _kind(value)
    if most_bytes >= _LEAST_BYTES:
        if isinstance(value, str):
            short = _text(value, most_bytes)
        elif isinstance(value, list):
            short = _entries(value, most_bytes)
        elif isinstance(value, dict):
            short = _object(value, most_bytes)
    return short if _size(short) <= most_bytes else _kind(value)


def part_of(value: Any, path: str) -> Any:
    """Returns a part of an answer.

    Args:
        value: JSON containers.
        path: Keys and places, joined by dots, such as ``plans.0.policies``; "" for the whole.

    Raises:
        UsageError: There is no such part.
    """
    walked: list[str] = []
    for key in path.split(".") if path else []:
        where = ".".join(walked) or "the answer"
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            known = f"keys {', '.join(value)}" if isinstance(value, dict) else _kind(value)
            raise UsageError(f"{where} has no {key!r}: it has {known}."[:1000])
        walked.append(key)
    return value


def page_of(value: Any, offset: int) -> Any:
    """Returns a list or a text from an offset on; other values as they are.

    Raises:
        UsageError: The value is neither a list nor a text, and the offset is not 0.
    """
    if isinstance(value, list | str):
        return value[offset:]
    if offset:
        raise UsageError("only lists and texts have an offset.")
    return value


def _size(value: Any) -> int:
    return len(encode(value).encode())


def _text(value: str, most_bytes: int) -> str:
    end = f"... ({len(value)} characters)"
    kept = value[: max(most_bytes - len(end) - 2, 0)]
    while kept and _size(kept + end) > most_bytes:  # letters of several bytes, and escaped ones
        kept = kept[: -max(1, (_size(kept + end) - most_bytes) // 4)]
    return kept + end


def _entries(value: list[Any], most_bytes: int) -> list[Any]:
    room = most_bytes - 2 - _size(f"... {len(value)} more") - 1
    kept: list[Any] = []
    for one in value:
        # The first entry is shown in any case, later ones only if they fit whole.
        short = shortened(one, room - 1) if not kept else one
        if _size(short) + 1 > room:
            break
        kept.append(short)
        room -= _size(short) + 1
    return [*kept, f"... {len(value) - len(kept)} more"]


def _object(value: dict[str, Any], most_bytes: int) -> dict[str, Any]:
    room = most_bytes - 2
    kept: dict[str, Any] = {}
    for key, one in value.items():  # as many keys as have room for their kind at least
        least = _size(key) + 2 + min(_size(one), _LEAST_BYTES)
        if room - least < (0 if len(kept) + 1 == len(value) else _LEAST_BYTES):
            break
        kept[key] = one
        room -= least
    if len(kept) < len(value):
        kept["..."] = f"{len(value) - len(kept)} more"
    room += sum(min(_size(one), _LEAST_BYTES) for one in kept.values()) - (_LEAST_BYTES if "..." in kept else 0)
    shares: dict[str, int] = {}
    for left, (key, one) in enumerate(sorted(kept.items(), key=lambda item: _size(item[1]))):
        shares[key] = min(_size(one), room // (len(kept) - left))
        room -= shares[key]
    return {key: shortened(one, shares[key]) for key, one in kept.items()}


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"[{len(value)} entries]"
    if isinstance(value, dict):
        return f"{{{len(value)} keys}}"
    return f"a {type(value).__name__}"
