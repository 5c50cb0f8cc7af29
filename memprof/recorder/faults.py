"""Internal faults of the recorder: they end the recording, not the job."""

from __future__ import annotations

import os
import signal
import traceback
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, Protocol

from memprof.recorder.calls.tracebacks import clean_uncaught, remove_own_frames
from memprof.trace.files.private_file import FileSizeLimitError, write_private
from memprof.trace.secrets import mask_text


class _GivesUp(Protocol):
    def give_up(self, fault: str) -> None: ...


def explain_fault(error: Exception) -> str:
    """Returns the text to keep of a fault: one sentence if the user can act on it, else the traceback."""
    if isinstance(error, FileSizeLimitError):
        return str(error)
    if is_from_signal_handler(error):
        return f"a signal handler of the job raised {type(error).__name__} inside the recorder"
    try:
        return mask_text("".join(traceback.format_exception(error)))
    except Exception:  # noqa: BLE001 - it reads sources, and the job may have replaced what reads files
        return f"{type(error).__name__}: {error}"


def write_fault(fault: str, observation: _GivesUp | None, folder: Path) -> None:
    """Saves a fault in the recording, or next to it if nothing has been recorded yet.

    Args:
        fault: What `explain_fault` returned.
        observation: The open observation, if any.
        folder: The folder that this process writes to.

    Raises:
        OSError: The fault cannot be written (disk full).
    """
    if observation is not None:
        observation.give_up(fault)
    else:
        write_private(folder.parent / f"recorder-{os.getpid()}.log", fault)


def raise_if_of_job(error: Exception) -> None:
    """Re-raises an error caught in the recorder that belongs to the job: one raised by a job's signal handler.

    Python may run a signal handler between any two instructions, including the recorder's.

    Raises:
        Exception: `error`.
    """
    if is_from_signal_handler(error):
        remove_own_frames(error)
        clean_uncaught()
        raise error


def is_from_signal_handler(error: BaseException) -> bool:
    """Whether an error propagated out of a function that is installed as a signal handler."""
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code(handler: Any) -> CodeType | None:
    """Returns the code object of a signal handler written in Python, None for any other handler."""
    while isinstance(handler, partial):
        handler = handler.func
    if not callable(handler):
        return None
    code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None
