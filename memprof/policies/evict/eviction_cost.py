"""The cost of evicting a value: its own recompute time, and that of the evicted values around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from memprof.policies.evict.classes import Classes
from memprof.policies.evict.heuristics import HEURISTICS

Value = TypeVar("Value", bound=Hashable)


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
