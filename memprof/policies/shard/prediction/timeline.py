"""Lets collectives run beside the computation, and finds what of them it must wait for."""

from __future__ import annotations

import numpy as np

from memprof.trace.schema import Floats
from memprof.trace.step import Step


class Timeline:
    """Two streams: the operators of the step, and collectives one after the other beside them.

    A collective begins when the operator before it has run and the collective before it is through. The operator
    that needs it waits.
    """

    def __init__(self, step: Step) -> None:
        """Knows the step as recorded; the time between its operators counts with them."""
        self._step = step
        self._sent: list[tuple[int, int, float]] = []

    def send(self, before: int, duration_us: float, needed_at: int) -> None:
        """Notes a collective.

        Args:
            before: Operator of the step before which it is sent.
            duration_us: How long it takes.
            needed_at: Operator of the step that waits for it.
        """
        self._sent.append((before, needed_at, duration_us))

    def duration_us(self, durations_us: Floats) -> float:
        """Returns how long the step takes.

        Args:
            durations_us: Of the step's own operators, without the collectives. Shape (ops,).
        """
        recorded = float(np.nansum(self._step.ops.duration_us))
        factor = self._step.duration_us / recorded if recorded else 1.0
        ends = np.concatenate([[0.0], np.cumsum(np.nan_to_num(durations_us))]) * factor
        delay, free = 0.0, 0.0
        waiting: list[tuple[int, float]] = []
        for before, needed_at, duration in sorted(self._sent, key=lambda sent: sent[0]):
            # Those needed up to here have held the computation up already.
            for place, arrives in sorted(each for each in waiting if each[0] <= before):
                delay = max(delay, arrives - float(ends[place]))
            waiting = [each for each in waiting if each[0] > before]
            free = max(free, float(ends[before]) + delay) + duration
            waiting.append((needed_at, free))
        for place, arrives in sorted(waiting):
            delay = max(delay, arrives - float(ends[place]))
        return float(ends[-1]) + delay
