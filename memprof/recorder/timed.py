"""Measures what each operator costs in a step without the dispatch mode, with torch's C++ profiler."""

from __future__ import annotations

from typing import Any

from torch._C import _autograd, _profiler

from memprof.recorder.log import RawLog
from memprof.recorder.native import start_profiler


class OperatorTimes:
    """Times every operator of the thread that started it."""

    def __init__(self, log: RawLog) -> None:
        """Shares the recorder's log."""
        self._log = log
        self.is_running = False

    def start(self) -> bool:
        """Starts timing; returns False when the job's own profiler is running."""
        if _autograd._profiler_enabled():
            return False
        start_profiler(_profiler.RecordScope.FUNCTION, profile_memory=False)
        self.is_running = True
        return True

    def stop(self) -> None:
        """Stops, and logs the times, parents before children."""
        if not self.is_running:
            return
        self.is_running = False
        times = self._log.times
        intern = self._log.intern
        pending: list[tuple[Any, int]] = [
            (e, 0) for e in reversed(_autograd._disable_profiler().experimental_event_tree())
        ]
        while pending:
            event, depth = pending.pop()
            times.extend((intern("names", event.name), event.start_time_ns, event.duration_time_ns, depth))
            pending.extend((child, depth + 1) for child in reversed(event.children))

    def abandon(self) -> None:
        """Drops the session in a forked child."""
        if self.is_running:
            self.is_running = False
            _autograd._disable_profiler()
