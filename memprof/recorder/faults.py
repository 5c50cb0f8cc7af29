"""What is kept of a fault of the recorder's own, which ends the recording and not the job."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Protocol

from memprof.trace.masking import mask_text
from memprof.trace.private_file import write_private
from memprof.trace.size_limit import FileSizeLimitError


class _GivesUp(Protocol):
    def give_up(self, fault: str) -> None: ...


def explain_fault(error: Exception) -> str:
    """Returns what is kept of a fault: a sentence where the user can do something about it, else the traceback."""
    if isinstance(error, FileSizeLimitError):
        return str(error)
    return mask_text("".join(traceback.format_exception(error)))


def write_fault(fault: str, observation: _GivesUp | None, folder: Path) -> None:
    """Saves a fault in the recording, or next to it if nothing has been recorded yet.

    Args:
        fault: What `explain_fault` returned.
        observation: What is observed, if anything.
        folder: The folder that this process writes to.

    Raises:
        OSError: It cannot be written: the disk is full.
    """
    if observation is not None:
        observation.give_up(fault)
    else:
        write_private(folder.parent / f"recorder-{os.getpid()}.log", fault)
