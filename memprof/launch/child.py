"""Starts the recorder in a process of a recorded job, once torch is imported there."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any

from memprof.recorder.native import NativeEvents
from memprof.recorder.recorder import Recorder
from memprof.recorder.window import Window

_recorder: Recorder | None = None


def install(settings: dict[str, Any]) -> None:
    """Installs the recorder in this process, and in its forked children.

    Args:
        settings: `spool` (the job's spool folder), `skip`, `steps` and `stop`.
    """
    spool = Path(settings["spool"])
    window = Window(int(settings["skip"]), int(settings["steps"]), bool(settings["stop"]))
    NativeEvents.initialize()
    _start(spool, window)
    atexit.register(_finish)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _start_in_child(spool, window))


def is_recording() -> bool:
    """Whether this process is recorded by `memprof record`."""
    return _recorder is not None


def _start(spool: Path, window: Window) -> None:
    global _recorder  # noqa: PLW0603 - one recorder a process, reached again at exit and after fork
    _recorder = Recorder(spool / f"process-{os.getpid()}", window)
    _recorder.install()


def _start_in_child(spool: Path, window: Window) -> None:
    if _recorder is not None:
        _recorder.abandon()
    _start(spool, window)  # the child may be a rank that trains; a data loader's worker never calls a model


def _finish() -> None:
    if _recorder is not None:
        _recorder.finish("the job ended")
