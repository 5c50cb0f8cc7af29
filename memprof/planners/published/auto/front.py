"""The Pareto front of the schedules found so far, in bytes and time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from memprof.planners.published.auto.repeats import Repeat


@dataclass(frozen=True)
class Choice:
    """One schedule.

    Attributes:
        peak_bytes: Peak allocated bytes.
        extra_us: Time of its repeats.
        repeats: The repeated operators, each with its stage.
    """

    peak_bytes: int
    extra_us: float
    repeats: tuple[Repeat, ...]


class Front:
    """Keeps the Pareto-optimal choices, ordered by bytes, so a larger budget never gets a slower schedule."""

    def __init__(self) -> None:
        """Starts empty."""
        self._peaks: list[int] = []
        self.choices: list[Choice] = []

    def least_us(self, budget_bytes: int) -> float:
        """Returns the least time within a budget; infinity where nothing fits."""
        at = bisect_right(self._peaks, budget_bytes) - 1
        return self.choices[at].extra_us if at >= 0 else float("inf")

    def best(self, budget_bytes: int) -> Choice | None:
        """Returns the fastest choice within a budget."""
        at = bisect_right(self._peaks, budget_bytes) - 1
        return self.choices[at] if at >= 0 else None

    def add(self, choice: Choice) -> None:
        """Adds a choice unless it is dominated, and removes those it dominates."""
        if self.least_us(choice.peak_bytes) <= choice.extra_us:
            return
        low = bisect_left(self._peaks, choice.peak_bytes)
        high = low
        while high < len(self.choices) and self.choices[high].extra_us >= choice.extra_us:
            high += 1
        self.choices[low:high] = [choice]
        self._peaks[low:high] = [choice.peak_bytes]
