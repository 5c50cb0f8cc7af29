"""Decides when a light recording may listen: for a small share of the time that has passed, and never for too much."""

from __future__ import annotations

import time

#: Share of the run's time that reading out what was heard may take.
_SHARE = 0.02
#: Time that every run may take for it from the start, so that short runs are heard too.
_ALLOWANCE_NS = 300_000_000
#: A stretch of more events than this is the last: reading out takes 2 kB of memory for each.
_MOST_EVENTS = 300_000


class Budget:
    """Keeps account of the time spent.

    Attributes:
        is_over: Listening takes too much memory in this job.
    """

    def __init__(self) -> None:
        """Starts the clock."""
        self._start_ns = time.monotonic_ns()
        self._spent_ns = 0
        self.is_over = False

    def may_listen(self) -> bool:
        """Whether another stretch may begin."""
        allowed = _ALLOWANCE_NS + _SHARE * (time.monotonic_ns() - self._start_ns)
        return not self.is_over and self._spent_ns < allowed

    def spend(self, since_ns: int, events: int) -> None:
        """Notes that the job was held up since a moment of the monotonic clock, to read out so many events."""
        self._spent_ns += time.monotonic_ns() - since_ns
        self.is_over |= events > _MOST_EVENTS
