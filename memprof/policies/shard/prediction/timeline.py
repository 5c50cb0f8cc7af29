"""Overlaps collectives with the computation, and computes the time spent waiting for them."""

from __future__ import annotations

import numpy as np

from memprof.trace.schema import Floats
from memprof.trace.step import Step


class Timeline:
    """Two streams: the operators of the step, and concurrent collectives in sequence.

    A collective begins after the preceding operator and the preceding collective. The operator that needs it
    waits.
    """

    def __init__(self, step: Step) -> None:
        """Stores the recorded step; the time between its operators is attributed to them."""
        self._step = step
        self._sent: list[tuple[int, int, float]] = []

    def send(self, before: int, duration_us: float, needed_at: int) -> None:
        """Adds a collective.

        Args:
            before: Operator of the step before which it is sent.
            duration_us: Its duration.
            needed_at: Operator of the step that waits for it.
        """
        self._sent.append((before, needed_at, duration_us))

    def duration_us(self, durations_us: Floats) -> float:
        """Returns the duration of the step.

        Args:
            durations_us: Of the step's own operators, without the collectives. Shape (ops,).
        """
        recorded = float(np.nansum(self._step.ops.duration_us))
        factor = self._step.duration_us / recorded if recorded else 1.0
        ends = np.concatenate([[0.0], np.cumsum(np.nan_to_num(durations_us))]) * factor
        delay, free = 0.0, 0.0
        waiting: list[tuple[int, float]] = []
        for before, needed_at, duration in sorted(self._sent, key=lambda sent: sent[0]):
            # Those needed up to here have already delayed the computation.
            for place, arrives in sorted(each for each in waiting if each[0] <= before):
                delay = max(delay, arrives - float(ends[place]))
            waiting = [each for each in waiting if each[0] > before]
            free = max(free, float(ends[before]) + delay) + duration
            waiting.append((needed_at, free))
        for place, arrives in sorted(waiting):
            delay = max(delay, arrives - float(ends[place]))
        return float(ends[-1]) + delay
