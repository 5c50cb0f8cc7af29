"""Decides when a light recording may record events: a small share of the processor time, bounded in memory."""

from __future__ import annotations

import time

#: Share of the thread's processor time that reading out events may take: other load on the machine, and time in which
#: the job waits, do not add to it.
_SHARE = 0.008
#: Time for it that every run gets from the start, so that short runs have events too.
_ALLOWANCE_NS = 300_000_000
#: A stretch with more events than this is the last: reading out takes 2 kB of memory per event.
_MOST_EVENTS = 300_000


class Budget:
    """Tracks the time spent.

    Attributes:
        is_over: Recording events takes too much memory in this job.
    """

    def __init__(self) -> None:
        """Starts the clock."""
        self._start_ns = time.thread_time_ns()
        self._spent_ns = 0
        self.is_over = False

    def may_listen(self) -> bool:
        """Whether another stretch may begin."""
        allowed = _ALLOWANCE_NS + _SHARE * (time.thread_time_ns() - self._start_ns)
        return not self.is_over and self._spent_ns < allowed

    def spend(self, since_ns: int, events: int) -> None:
        """Charges the time since `since_ns` (the thread's processor time), in which `events` were read."""
        self._spent_ns += time.thread_time_ns() - since_ns
        self.is_over |= events > _MOST_EVENTS
