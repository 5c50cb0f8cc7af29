"""The cost of evicting a value: its own recompute time, and that of the evicted values around it."""

from __future__ import annotations

from memprof.planners.graph.graph import Graph

#: The heuristics of Kirisame 2021; see EvictionCost.
HEURISTICS = ("eq-class", "msps", "local", "full")


class EvictionCost:
    """Tracks evicted values, and how much recompute time evicting each value in memory would add.

    Source: Kirisame 2021, section 4.1 and appendix C. With c the time of a value's operator:

    - ``full``: c, and c of all evicted values it depends on or that depend on it
    - ``eq-class``: c, and the sums of the classes of evicted neighbours; classes are joined on eviction, a value's time
      is subtracted on recompute, and classes are never split
    - ``local``: c alone
    - ``msps``: c, and c of the evicted values it depends on (after Peng 2020, Capuchin)

    Attributes:
        outdated: Values whose neighbourhood changed since their cost was last read.
    """

    def __init__(self, graph: Graph, heuristic: str) -> None:
        """Starts with nothing evicted."""
        self.outdated: set[int] = set()
        self._heuristic = heuristic
        self._cost_us: list[float] = graph.cost_us[graph.value_op].tolist()
        reads = graph.reads_by_op()
        self._sources = [reads[maker] for maker in graph.value_op.tolist()]
        self._heirs: list[list[int]] = [[] for _ in range(graph.values)]
        for value, sources in enumerate(self._sources):
            for source in sources:
                self._heirs[source].append(value)
        self._is_evicted = [False] * graph.values
        # Classes get a new number at every eviction, so a value that is evicted again leaves its old class unchanged.
        self._class_number = [0] * graph.values
        self._joined_to: list[int] = []
        self._class_us: list[float] = []
        # Values in memory next to a class, by class number: their eviction cost changes with the class.
        self._beside: list[set[int]] = []

    def cost_us(self, value: int) -> float:
        """Returns the eviction cost of a value in memory, in microseconds."""
        own = self._cost_us[value]
        if self._heuristic == "local":
            return own
        if self._heuristic == "eq-class":
            near = {self._class_of(other) for other in self._neighbours(value) if self._is_evicted[other]}
            return own + sum(self._class_us[number] for number in sorted(near))
        around = self._reached(value, self._sources)
        if self._heuristic == "full":
            around |= self._reached(value, self._heirs)
        return own + sum(self._cost_us[other] for other in sorted(around))

    def evicted(self, value: int) -> None:
        """Records that a value was evicted."""
        if self._is_evicted[value]:
            return
        self._is_evicted[value] = True
        if self._heuristic == "eq-class":
            self._join(value)
        elif self._heuristic != "local":
            self._outdate_around(value)

    def remade(self, value: int) -> None:
        """Records that a value was recomputed."""
        if not self._is_evicted[value]:
            return
        if self._heuristic == "eq-class":
            number = self._class_of(value)
            self._class_us[number] -= self._cost_us[value]
            self.outdated |= self._beside[number]
            for other in self._neighbours(value):
                if self._is_evicted[other]:
                    self._beside[self._class_of(other)].add(value)
        elif self._heuristic != "local":
            self._outdate_around(value)
        self._is_evicted[value] = False
        self.outdated.add(value)

    def _neighbours(self, value: int) -> list[int]:
        return self._sources[value] + self._heirs[value]

    def _reached(self, value: int, along: list[list[int]]) -> set[int]:
        """Returns the evicted values reachable in one direction through evicted values."""
        reached: set[int] = set()
        stack = [value]
        while stack:
            for other in along[stack.pop()]:
                if self._is_evicted[other] and other not in reached:
                    reached.add(other)
                    stack.append(other)
        return reached

    def _outdate_around(self, value: int) -> None:
        """Marks all neighbours of the connected evicted values around this one."""
        ways = [self._heirs] if self._heuristic == "msps" else [self._heirs, self._sources]
        for along in ways:
            for other in (value, *self._reached(value, along)):
                self.outdated.update(along[other])

    def _class_of(self, value: int) -> int:
        number = self._class_number[value]
        while self._joined_to[number] != number:
            self._joined_to[number] = number = self._joined_to[self._joined_to[number]]
        return number

    def _join(self, value: int) -> None:
        """Puts a value into a new class and joins it with the neighbouring classes."""
        number = len(self._joined_to)
        self._class_number[value] = number
        self._joined_to.append(number)
        self._class_us.append(self._cost_us[value])
        neighbours = self._neighbours(value)
        self._beside.append(set(neighbours))
        for other in neighbours:
            if not self._is_evicted[other] or (near := self._class_of(other)) == number:
                continue
            small, number = sorted((number, near), key=lambda one: len(self._beside[one]))
            self._joined_to[small] = number
            self._class_us[number] += self._class_us[small]
            self._beside[number] |= self._beside[small]
            self._beside[small] = set()
        self._beside[number].discard(value)
        self.outdated |= self._beside[number]
