"""A fake clock: deadlines are tested without waiting for them."""

from __future__ import annotations

import math


class Clock:
    """Replaces the module ``time`` in a module under test; it advances only on request.

    Attributes:
        now_s: The current time, in seconds.
        step_s: By how much each read advances it, in seconds.
        deadline_s: The time after which reads are late.
        late: Number of reads since then.
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

    perf_counter = process_time = monotonic

    def perf_counter_ns(self) -> int:
        """Returns the moment in nanoseconds, and goes on."""
        return round(self.monotonic() * 1e9)

    def time_ns(self) -> int:
        """Returns the moment in nanoseconds."""
        return round(self.now_s * 1e9)
