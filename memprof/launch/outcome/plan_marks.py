"""The status of a plan in the job's processes: files in the spool folder, read by the parent."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

from memprof.trace.files.private_file import FILE_MODE, open_private

#: Exit status of a job that ends because its plan does not fit.
REFUSED_STATUS = 125

_REFUSED = "plan-refused"
_FAULT = "plan-fault"
_APPLIED = "plan-applied-"
_IDLE = "plan-idle-"


def refuse(sentence: str, spool: Path, policy: str = "") -> NoReturn:
    """Ends the job with status 125; the parent prints why.

    Args:
        sentence: The reason.
        spool: The recording's spool folder.
        policy: Name of the policy at fault, "" if unknown.

    Raises:
        SystemExit: Always, in the main thread; in another thread it would end only that thread.
    """
    mark_refused(spool, sentence)
    if policy:
        mark_fault(spool, policy)
    if threading.current_thread() is threading.main_thread():
        raise SystemExit(REFUSED_STATUS)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(REFUSED_STATUS)


def mark_refused(spool: Path, sentence: str) -> None:
    """Records why a process ended itself; only the first is kept."""
    _mark_first(spool, _REFUSED, sentence)


def mark_fault(spool: Path, policy: str) -> None:
    """Records which policy raised the error that ends a process; only the first is kept."""
    _mark_first(spool, _FAULT, policy)


def _mark_first(spool: Path, name: str, text: str) -> None:
    try:
        descriptor = os.open(os.path.join(spool, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE)
    except OSError:
        # Another process was first, or the file cannot be written: the exit status suffices.
        return
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def mark_applied(spool: Path, numbers: list[int]) -> None:
    """Records which policies of the plan this process has applied."""
    try:
        with open_private(os.path.join(spool, f"{_APPLIED}{os.getpid()}"), encoding="utf-8") as file:
            json.dump(numbers, file)
    except OSError:
        # A full disk must not fail the job.
        pass


def mark_idle(spool: Path, sentences: list[str]) -> None:
    """Records which policies have had no effect in this process so far, one sentence each."""
    with (
        contextlib.suppress(OSError),
        open_private(  # a full disk must not fail the job
            os.path.join(spool, f"{_IDLE}{os.getpid()}"), encoding="utf-8"
        ) as file,
    ):
        json.dump(sentences, file)


def read_idle(spool: Path) -> list[str]:
    """Returns which policies have had no effect in any process that tried them, one sentence each."""
    found: list[list[str]] = []
    for path in sorted(spool.glob(f"{_IDLE}*")):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_text(encoding="utf-8")))
    return [sentence for sentence in found[0] if all(sentence in others for others in found)] if found else []


def read_refusal(spool: Path) -> str:
    """Returns why the job ended itself, "" if it did not."""
    return _read_mark(spool, _REFUSED)


def read_fault(spool: Path) -> str:
    """Returns the name of the policy that raised the error which ended the job, "" if unknown."""
    return _read_mark(spool, _FAULT)


def _read_mark(spool: Path, name: str) -> str:
    try:
        return (spool / name).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def read_applied(spool: Path) -> set[int]:
    """Returns which policies of the plan were applied in any process of the job."""
    numbers: set[int] = set()
    for path in spool.glob(f"{_APPLIED}*"):
        try:
            numbers.update(int(number) for number in json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
    return numbers
