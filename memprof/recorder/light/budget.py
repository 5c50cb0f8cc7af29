"""Decides when a light recording may record events: a small share of the processor time, bounded in memory."""

from __future__ import annotations

import time

#: Share of the thread's processor time that counting and reading out events may take together: other load on the
#: machine, and time in which the job waits, do not add to it. Where counting takes most of it, reading out has the
#: least share.
_SHARE, _LEAST_SHARE = 0.008, 0.001
#: What counting takes for each step, for each module call, and for each allocation and free: torch's own bookkeeping.
_STEP_NS, _CALL_NS, _EVENT_NS = 40_000, 1_100, 540
#: Time for it that every run gets from the start, so that short runs have events too.
_ALLOWANCE_NS = 300_000_000
#: A stretch with more events than this is the last: reading out takes 2 kB of memory per event.
_MOST_EVENTS = 300_000

_clock_ns = time.monotonic_ns


class Budget:
    """Tracks the time spent.

    Attributes:
        is_over: Recording events takes too much memory in this job.
    """

    def __init__(self) -> None:
        """Starts the clock."""
        self._start_ns = time.thread_time_ns()
        self._spent_ns = self._counting_ns = 0
        self._not_before_ns = 0
        self.is_over = False

    def may_listen(self) -> bool:
        """Whether another stretch may begin."""
        now_ns = _clock_ns()
        if self.is_over or now_ns < self._not_before_ns:
            return False
        elapsed_ns = time.thread_time_ns() - self._start_ns
        allowed_ns = _ALLOWANCE_NS + max(_LEAST_SHARE * elapsed_ns, _SHARE * elapsed_ns - self._counting_ns)
        # A thread's processor time, which takes longer to read, does not pass faster than time.
        self._not_before_ns = now_ns + max(0, int((self._spent_ns - allowed_ns) / _SHARE))
        return self._spent_ns < allowed_ns

    def count_step(self, calls: int, events: int) -> None:
        """Charges a step in which no events were recorded.

        Args:
            calls: Its module calls.
            events: Allocations and frees of a step like it.
        """
        self._counting_ns += _STEP_NS + calls * _CALL_NS + events * _EVENT_NS

    def spend(self, since_ns: int, events: int) -> None:
        """Charges the time since `since_ns` (the thread's processor time), in which `events` were read."""
        self._spent_ns += time.thread_time_ns() - since_ns
        self.is_over |= events > _MOST_EVENTS
