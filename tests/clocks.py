"""A clock of the test's own: what is to happen in time is asserted without waiting for it."""

from __future__ import annotations

import math


class Clock:
    """Replaces the module ``time`` in a module under test; it advances only on request.

    Attributes:
        now_s: The moment, in seconds.
        step_s: What every look at it takes, in seconds.
        deadline_s: The moment after which looks are late.
        late: Looks since then.
    """

    def __init__(self, *, step_s: float = 0.0, deadline_s: float = math.inf) -> None:
        self.now_s = 0.0
        self.step_s = step_s
        self.deadline_s = deadline_s
        self.late = 0

    def monotonic(self) -> float:
        """Returns the moment, and goes on."""
        self.late += self.now_s >= self.deadline_s
        self.now_s += self.step_s
        return self.now_s

    perf_counter = monotonic

    def perf_counter_ns(self) -> int:
        """Returns the moment in nanoseconds, and goes on."""
        return round(self.monotonic() * 1e9)

    def time_ns(self) -> int:
        """Returns the moment in nanoseconds."""
        return round(self.now_s * 1e9)
