"""Chooses eviction victims by the heuristics of Dynamic Tensor Rematerialization: large, stale, cheap to recompute."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from memprof.trace.schema import Floats

_Numbers = TypeVar("_Numbers", float, Floats)
#: Added to staleness, in microseconds: values used last have none.
_LEAST_STALE_US = 1e-6
Value = TypeVar("Value", bound=Hashable)
#: Candidates sampled per victim (Kirisame 2021, appendix E.2), and gone values visited per candidate and direction.
_SAMPLE, _REACH = 48, 24


class Classes:
    """Classes that are joined and never split; a member that leaves takes its amount along.

    Source: Kirisame 2021, appendix C. Members are numbers; each eviction makes a new one, so a value evicted again
    leaves its old class unchanged.
    """

    def __init__(self) -> None:
        self._joined_to: list[int] = []
        self._amount: list[float] = []
        self._total: list[float] = []

    def add(self, amount: float) -> int:
        """Adds a class of one member, with its time or bytes, and returns the member's number."""
        number = len(self._joined_to)
        self._joined_to.append(number)
        self._amount.append(amount)
        self._total.append(amount)
        return number

    def of(self, number: int) -> int:
        """Returns the class of a member, as the number of one of its members."""
        joined_to = self._joined_to
        while joined_to[number] != number:
            joined_to[number] = number = joined_to[joined_to[number]]
        return number

    def join(self, number: int, other: int) -> None:
        """Joins the classes of two members."""
        number, other = self.of(number), self.of(other)
        if number != other:
            self._joined_to[other] = number
            self._total[number] += self._total[other]

    def leave(self, number: int) -> None:
        """Subtracts a member's amount from its class."""
        self._total[self.of(number)] -= self._amount[number]

    def total(self, number: int) -> float:
        """Returns the summed amount of a class, by the number that ``of`` returns."""
        return self._total[number]

    def clear(self) -> None:
        """Removes all classes; numbers start again at 0."""
        self._joined_to.clear()
        self._amount.clear()
        self._total.clear()


@dataclass(frozen=True)
class Heuristic:
    """What evicting a value costs, and whether stale values go first.

    Source: Kirisame 2021, section 4.1 and appendix C: h = cost / (bytes x staleness), least first, with staleness on a
    clock of summed operator time. The cost is the value's own recompute time and that of evicted values around it.

    Attributes:
        counts_sources: Whether the cost includes the evicted values it depends on.
        counts_dependants: Whether it includes the evicted values that depend on it.
        has_classes: Whether evicted neighbours are summed by equivalence class instead of being visited.
        is_stale_cheap: Whether h includes staleness.
    """

    counts_sources: bool
    counts_dependants: bool
    has_classes: bool = False
    is_stale_cheap: bool = True

    def h(self, cost_us: _Numbers, size_bytes: _Numbers, stale_us: _Numbers) -> _Numbers:
        """Returns h of a value, or of an array of values.

        Args:
            cost_us: Eviction cost.
            size_bytes: Size.
            stale_us: Operator time since the last use.
        """
        h = cost_us / size_bytes
        return h / (stale_us + _LEAST_STALE_US) if self.is_stale_cheap else h


#: By name. ``msps`` is the cost of Peng 2020, Capuchin: what recomputing the value itself takes.
HEURISTICS = {
    "eq-class": Heuristic(True, True, has_classes=True),
    "msps": Heuristic(True, False, is_stale_cheap=False),
    "local": Heuristic(False, False),
    "full": Heuristic(True, True),
}


@dataclass(frozen=True)
class Relations(Generic[Value]):
    """What costs are read from: a planner's values, storages of a step, or contents in a job.

    Attributes:
        own_us: Returns the time of the operators that compute a value, in microseconds.
        sources: Returns the values that a value is computed from.
        dependants: Returns the values computed from a value.
        is_gone: Returns whether a value would have to be recomputed for a reader.
    """

    own_us: Callable[[Value], float]
    sources: Callable[[Value], Iterable[Value]]
    dependants: Callable[[Value], Iterable[Value]]
    is_gone: Callable[[Value], bool]


class EvictionCost(Generic[Value]):
    """Costs of evicting values, given what was evicted before.

    With classes, each evicted value is a member of one. Values that are gone otherwise, because the job itself freed
    them, are in none and are visited one by one.
    """

    def __init__(
        self,
        relations: Relations[Value],
        heuristic: str,
        reach: int | None = None,
        numbers: MutableMapping[Value, int] | None = None,
    ) -> None:
        """Starts with nothing evicted.

        Args:
            relations: What costs are read from.
            heuristic: A name in ``HEURISTICS``.
            reach: Gone values to visit in each direction; None for all, as in the paper. The runtime bounds them, since
                the job waits while it chooses, and so does its prediction.
            numbers: Receives the class member of each evicted value. The runtime gives a mapping that does not keep the
                values alive, since they hold memory.
        """
        self.heuristic = HEURISTICS[heuristic]
        self._relations = relations
        self._reach = math.inf if reach is None else reach
        self._classes = Classes()
        self._numbers: MutableMapping[Value, int] = {} if numbers is None else numbers
        self._ways: list[Callable[[Value], Iterable[Value]]] = []
        if self.heuristic.counts_sources:
            self._ways.append(relations.sources)
        if self.heuristic.counts_dependants:
            self._ways.append(relations.dependants)

    def cost_us(self, value: Value) -> float:
        """Returns the eviction cost of a value in memory, in microseconds."""
        around: dict[Value, None] = {}
        for way in self._ways:
            around.update(self._gone_around(value, way))
        own_us, numbers = self._relations.own_us, self._numbers
        classes = {self._classes.of(numbers[other]) for other in around if other in numbers}
        visited_us = math.fsum(own_us(other) for other in around if other not in numbers)
        return own_us(value) + visited_us + math.fsum(map(self._classes.total, classes))

    def _gone_around(self, value: Value, way: Callable[[Value], Iterable[Value]]) -> dict[Value, None]:
        """Returns the gone values reached in one direction through gone values without a class, in that order."""
        is_gone, found, stack = self._relations.is_gone, dict[Value, None](), [value]
        while stack and len(found) < self._reach:
            for other in way(stack.pop()):
                if other not in found and is_gone(other):
                    found[other] = None
                    if other not in self._numbers:
                        stack.append(other)
        return found

    def evicted(self, value: Value) -> None:
        """Records that a value was evicted: it becomes a class, joined with those of its evicted neighbours."""
        if not self.heuristic.has_classes:
            return
        number = self._numbers[value] = self._classes.add(self._relations.own_us(value))
        for way in self._ways:
            for other in way(value):
                if other in self._numbers and self._relations.is_gone(other):
                    self._classes.join(number, self._numbers[other])

    def remade(self, value: Value) -> None:
        """Records that a value was recomputed: its time leaves its class."""
        if (number := self._numbers.pop(value, None)) is not None:
            self._classes.leave(number)

    def class_of(self, value: Value) -> int:
        """Returns the class of an evicted value."""
        return self._classes.of(self._numbers[value])

    def forget_classes(self) -> None:
        """Removes all classes; call it when nothing evicted is needed any more."""
        self._numbers.clear()
        self._classes.clear()


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
