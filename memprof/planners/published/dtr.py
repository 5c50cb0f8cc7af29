"""Dynamic Tensor Rematerialization: a step under a hard memory cap, with every heuristic of the paper."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from memprof.planners.base import Planner, ScheduleRequest, ScheduleResult
from memprof.planners.graph.graph import Graph, needed_bytes
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.policies.evict.victims import HEURISTICS, EvictionCost, Relations
from memprof.trace.schema import NONE, Bools, Floats, Ints
from memprof.units import format_bytes


class Dtr(Planner):
    """Kirisame 2021: simulates every heuristic of the paper and keeps the fastest schedule by replay."""

    name: ClassVar[str] = "dtr"
    source: ClassVar[str] = "Kirisame 2021, Dynamic Tensor Rematerialization, sections 2 and 4.1"
    summary: ClassVar[str] = "runs the step within the budget and evicts what is stale, large and cheap to recompute"
    #: The heuristics to try.
    heuristics: ClassVar[tuple[str, ...]] = tuple(HEURISTICS)

    def search(self, task: ScheduleRequest) -> ScheduleResult:
        """Searches for the fastest schedule whose peak is within the budget."""
        graph, budget = task.graph, task.budget_bytes
        recorded = replay(graph, as_recorded(graph))
        if recorded.peak_bytes <= budget:
            return ScheduleResult("optimal", "The step fits as recorded.", recorded.runs, 0.0, budget)
        needed = needed_bytes(graph)
        if needed > budget:
            reason = f"A single operator with its inputs and outputs needs {format_bytes(needed)}."
            return ScheduleResult(
                "infeasible", reason, least_bytes=self._least_bytes(task, needed, recorded.peak_bytes)
            )
        best, chosen = self._best(task, budget)
        if best is None:
            least = self._least_bytes(task, budget, recorded.peak_bytes)
            status = "time limit" if task.is_late() else "nothing found"
            return ScheduleResult(
                status, "Every heuristic ran out of memory with nothing left to evict.", least_bytes=least
            )
        status = "time limit" if task.is_late() else "found"
        return ScheduleResult(status, f"The {chosen} heuristic was the fastest.", best, least_bytes=budget)

    def _best(self, task: ScheduleRequest, budget_bytes: int) -> tuple[Ints | None, str]:
        best: Ints | None = None
        chosen, least_us = "", float("inf")
        for heuristic in self.heuristics:
            runs = Simulation(task, budget_bytes, heuristic).runs()
            if runs is not None and (extra_us := replay(task.graph, runs).extra_us) < least_us:
                best, chosen, least_us = runs, heuristic, extra_us
        return best, chosen

    def _least_bytes(self, task: ScheduleRequest, low: int, high: int) -> int:
        """Bisects the smallest budget that its fastest heuristic can meet; 0 where the deadline passes first."""
        while high - low > high // 200 and not task.is_late():
            middle = (low + high) // 2
            runs = Simulation(task, middle, self.heuristics[0]).runs()
            if runs is None:
                low = middle
                continue
            peak = replay(task.graph, runs).peak_bytes  # with just that, other values are evicted, perhaps too few
            high = middle if Simulation(task, peak, self.heuristics[0]).runs() is None else peak
        return 0 if task.is_late() else high


class Simulation:
    """Runs a step and evicts when memory is full.

    Source: Kirisame 2021, section 2. An operator's evicted inputs are recomputed first, then all inputs are locked. To
    make room, the unlocked value of least h = cost / (bytes x staleness) is evicted, as ``Heuristic`` and
    ``EvictionCost`` define it. Values that the step no longer
    reads are evicted eagerly.
    """

    def __init__(self, task: ScheduleRequest, budget_bytes: int, heuristic: str) -> None:
        """Prepares a run.

        Args:
            task: The request, for its graph and deadline.
            budget_bytes: Hard memory cap, in bytes.
            heuristic: A name in ``HEURISTICS``.
        """
        graph = task.graph
        self._task, self._graph, self._budget = task, graph, budget_bytes
        self._costs = ValueCost(graph, heuristic)
        self._cost_us_of: Floats = np.array([self._costs.cost_us(value) for value in range(graph.values)])
        self._size_of: Floats = graph.value_bytes.astype(np.float64)
        self._reads, self._made = graph.reads_by_op(), graph.values_by_op()
        self._maker: list[int] = graph.value_op.tolist()
        self._taken: list[int] = graph.taken_from.tolist()
        self._size: list[int] = graph.value_bytes.tolist()
        self._cost_us: list[float] = graph.cost_us.tolist()
        self._workspace: list[int] = graph.workspace_bytes.tolist()
        self._is_alive: Bools = np.zeros(graph.values, dtype=np.bool_)
        self._locks: Ints = np.zeros(graph.values, dtype=np.int64)
        self._accessed: Floats = np.zeros(graph.values)
        self._clock = 0.0
        self._live = 0
        # After its last read a value is dead; if the recording holds it longer, it cannot be evicted then.
        self._last_read: Ints = graph.value_op.copy()
        np.maximum.at(self._last_read, graph.read_value, graph.read_op)
        held = np.where(graph.value_freed_op == NONE, graph.ops, graph.value_freed_op)
        self._is_held_longer: Bools = held > self._last_read
        self._dies_after: list[list[int]] = [[] for _ in range(graph.ops + 1)]
        for value, op_id in enumerate(np.maximum(held, self._last_read).tolist()):
            self._dies_after[op_id].append(value)
        self._is_dead: Bools = np.zeros(graph.values, dtype=np.bool_)

    def runs(self) -> Ints | None:
        """Returns the schedule; None if memory runs out with nothing to evict, or the deadline passes."""
        graph = self._graph
        order: list[int] = []
        between = int(graph.floor_bytes[0]) if graph.ops else 0
        for op_id in range(graph.ops):
            if self._task.is_late() or not self._remake_inputs(op_id, between, order):
                return None
            if not self._make_room(op_id, op_id, int(graph.floor_bytes[op_id])):
                return None
            self._run(op_id, order)
            self._lock(op_id, -1)
            between = int(graph.floor_after_bytes[op_id])
            for value in self._dies_after[op_id]:
                self._is_dead[value] = True
                if self._is_alive[value]:
                    self._evict(value)
        return np.array(order, dtype=np.int64)

    def _remake_inputs(self, op_id: int, floor: int, order: list[int]) -> bool:
        self._lock(op_id, 1)
        stack = [op_id]
        while stack:
            current = stack[-1]
            missing = next((value for value in self._reads[current] if not self._is_alive[value]), None)
            if missing is not None:
                stack.append(self._maker[missing])
                self._lock(self._maker[missing], 1)
                continue
            stack.pop()
            if current != op_id:
                if not self._make_room(current, op_id, floor):
                    return False
                self._run(current, order)
                self._lock(current, -1)
        return True

    def _lock(self, op_id: int, count: int) -> None:
        for value in self._reads[op_id]:
            self._locks[value] += count

    def _run(self, op_id: int, order: list[int]) -> None:
        order.append(op_id)
        self._clock += self._cost_us[op_id]
        for value in self._made[op_id]:
            source = self._taken[value]
            if source != NONE and self._is_alive[source]:
                self._evict(source)
            if not self._is_alive[value]:
                self._is_alive[value] = True
                self._live += self._size[value]
                self._costs.remade(value)
            self._accessed[value] = self._clock
        for value in self._reads[op_id]:
            self._accessed[value] = self._clock

    def _make_room(self, op_id: int, stage: int, floor: int) -> bool:
        """Evicts until an operator fits; returns False where nothing is left to evict."""
        needed = floor + self._workspace[op_id]
        for value in self._made[op_id]:
            # An output that is still live is remade next to the old copy, which is freed then.
            needed += self._size[value] - (self._size[self._taken[value]] if self._taken[value] != NONE else 0)
        while self._live + needed > self._budget:
            cheapest = None if self._task.is_late() else self._cheapest(stage)
            if cheapest is None:
                return False
            self._evict(cheapest)
        return True

    def _cheapest(self, stage: int) -> int | None:
        for value in self._costs.outdated:
            if self._is_alive[value]:
                self._cost_us_of[value] = self._costs.cost_us(value)
        self._costs.outdated.clear()
        is_only_held = self._is_held_longer & (self._last_read < stage) & ~self._is_dead
        may_go = np.flatnonzero(self._is_alive & (self._locks == 0) & ~is_only_held)
        if not len(may_go):
            return None
        stale = self._clock - self._accessed[may_go]
        h = self._costs.heuristic.h(self._cost_us_of[may_go], self._size_of[may_go], stale)
        return int(may_go[h.argmin()])

    def _evict(self, value: int) -> None:
        self._is_alive[value] = False
        self._live -= self._size[value]
        self._costs.evicted(value)


class ValueCost(EvictionCost[int]):
    """Tracks evicted values, and which costs they change: a planner compares all values at every eviction.

    Attributes:
        outdated: Values whose neighbourhood changed since their cost was last read.
    """

    def __init__(self, graph: Graph, heuristic: str) -> None:
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
