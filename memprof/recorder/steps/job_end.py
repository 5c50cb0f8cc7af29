"""Ends the job after its window."""

from __future__ import annotations

import signal
import sys
from typing import Any

_TIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")


def end_job() -> None:
    """Ends this process the way `sys.exit` does; a pool worker continues, since its result would be awaited forever.

    The job's timers are stopped: Python removes signal handlers as it exits, after which a timer would kill it.

    Raises:
        SystemExit: Always, except in a pool.
    """
    if _is_daemon():
        return
    for name in _TIMERS:
        timer = getattr(signal, name, None)  # missing on some systems
        if timer is not None:
            signal.setitimer(timer, 0)
    raise SystemExit(0)


def _is_daemon() -> bool:
    """Whether another process owns this one and ends it with itself, like the workers of `multiprocessing.Pool`."""
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    return multiprocessing is not None and bool(multiprocessing.current_process().daemon)
