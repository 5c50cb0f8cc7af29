"""Chooses eviction victims: large, stale and cheap to recompute."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass

from memprof.policies.evict.eviction_cost import EvictionCost, Relations, Value

#: Candidates sampled per victim (Kirisame 2021, appendix E.2), and gone values visited per candidate and direction.
_SAMPLE, _REACH = 48, 24


@dataclass(frozen=True)
class Facts(Relations[Value]):
    """What victims are chosen by.

    Attributes:
        may_go: Returns whether evicting a candidate would free its memory and its content could be restored.
        size_bytes: Returns a value's size.
        used_us: Returns when a value was last used, on the clock of summed operator time.
    """

    may_go: Callable[[Value], bool]
    size_bytes: Callable[[Value], float]
    used_us: Callable[[Value], float]


class Victims(EvictionCost[Value]):
    """The eviction candidates of remat's runtime, and of its prediction, which samples alike."""

    def __init__(self, facts: Facts[Value], heuristic: str, numbers: MutableMapping[Value, int] | None = None) -> None:
        """Starts without candidates.

        Args:
            facts: What victims are chosen by.
            heuristic: A name in ``HEURISTICS``.
            numbers: See ``EvictionCost``.
        """
        super().__init__(facts, heuristic, _REACH, numbers)
        self._facts = facts
        self._pool: list[Value] = []
        self._slot: dict[Value, int] = {}
        self._random = random.Random(0)  # a separate generator, which leaves the job's random numbers unchanged

    def add(self, value: Value) -> None:
        """Adds a candidate."""
        if value not in self._slot:
            self._slot[value] = len(self._pool)
            self._pool.append(value)

    def remove(self, value: Value) -> None:
        """Removes a candidate."""
        slot = self._slot.pop(value, None)
        if slot is not None and (last := self._pool.pop()) != value:
            self._pool[slot] = last
            self._slot[last] = slot

    def choose(self, clock_us: float) -> Value | None:
        """Returns the candidate of least h in a sample, or else among all; None if none may go.

        Args:
            clock_us: Current time on the clock of summed operator time.
        """
        pool = self._pool
        count = len(pool)
        if count > _SAMPLE:
            sample = [pool[self._random.randrange(count)] for _ in range(_SAMPLE)]
            if (victim := self._least(sample, clock_us)) is not None:
                return victim
        return self._least(pool, clock_us)

    def _least(self, values: Iterable[Value], clock_us: float) -> Value | None:
        facts, h_of = self._facts, self.heuristic.h

        def h(value: Value) -> float:
            return h_of(self.cost_us(value), facts.size_bytes(value), clock_us - facts.used_us(value))

        return min(filter(facts.may_go, values), key=h, default=None)
