"""The eviction costs of a graph's values, and which of them an eviction changes."""

from __future__ import annotations

from memprof.planners.graph.graph import Graph
from memprof.policies.evict.eviction_cost import EvictionCost, Relations


class ValueCost(EvictionCost[int]):
    """Tracks evicted values, and which costs they change: a planner compares all values at every eviction.

    Attributes:
        outdated: Values whose neighbourhood changed since their cost was last read.
    """

    def __init__(self, graph: Graph, heuristic: str) -> None:
        """Starts with nothing evicted.

        Args:
            graph: The graph.
            heuristic: A name in ``HEURISTICS``.
        """
        self.outdated: set[int] = set()
        reads = graph.reads_by_op()
        self._sources = [reads[maker] for maker in graph.value_op.tolist()]
        self._dependants: list[list[int]] = [[] for _ in range(graph.values)]
        for value, sources in enumerate(self._sources):
            for source in sources:
                self._dependants[source].append(value)
        self._is_evicted = [False] * graph.values
        # Values in memory next to a class: their eviction cost changes with the class.
        self._beside: dict[int, set[int]] = {}
        cost_us: list[float] = graph.cost_us[graph.value_op].tolist()
        relations = Relations(
            own_us=cost_us.__getitem__,
            sources=self._sources.__getitem__,
            dependants=self._dependants.__getitem__,
            is_gone=self._is_evicted.__getitem__,
        )
        super().__init__(relations, heuristic)

    def evicted(self, value: int) -> None:
        """Records that a value was evicted."""
        if self._is_evicted[value]:
            return
        self._is_evicted[value] = True
        if not self.heuristic.has_classes:
            self._outdate_around(value)
            return
        neighbours = self._sources[value] + self._dependants[value]
        near = {self.class_of(other) for other in neighbours if self._is_evicted[other]}
        super().evicted(value)
        *smaller, beside = sorted((set(neighbours), *map(self._beside.pop, near)), key=len)
        beside.update(*smaller)
        beside.discard(value)
        self._beside[self.class_of(value)] = beside
        self.outdated |= beside

    def remade(self, value: int) -> None:
        """Records that a value was recomputed."""
        if not self._is_evicted[value]:
            return
        if self.heuristic.has_classes:
            self.outdated |= self._beside[self.class_of(value)]
            for other in self._sources[value] + self._dependants[value]:
                if self._is_evicted[other]:
                    self._beside[self.class_of(other)].add(value)
            super().remade(value)
        else:
            self._outdate_around(value)
        self._is_evicted[value] = False
        self.outdated.add(value)

    def _outdate_around(self, value: int) -> None:
        """Marks all values that count this one: the heirs where costs include sources, and the reverse."""
        ways = [self._dependants] * self.heuristic.counts_sources + [self._sources] * self.heuristic.counts_dependants
        for way in ways:
            for other in (value, *self._gone_around(value, way.__getitem__)):
                self.outdated.update(way[other])
