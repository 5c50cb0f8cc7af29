"""Ends the job after its window."""

from __future__ import annotations

import signal
import sys
from typing import Any

_TIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")


def end_job() -> None:
    """Ends this process the way `sys.exit` does; one of a pool goes on, whose result would be waited for for ever.

    Timers of the job are stopped: Python takes its signal handlers away as it ends, and then a timer kills it.

    Raises:
        SystemExit: Always, but in a pool.
    """
    if _is_daemon():
        return
    for name in _TIMERS:
        timer = getattr(signal, name, None)  # not on every system
        if timer is not None:
            signal.setitimer(timer, 0)
    raise SystemExit(0)


def _is_daemon() -> bool:
    """Whether another process uses this one and ends it with itself, as those of `multiprocessing.Pool` are."""
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    return multiprocessing is not None and bool(multiprocessing.current_process().daemon)
