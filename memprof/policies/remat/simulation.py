"""Simulates the runtime on a recorded step within a budget: what is dropped, when, and what is recomputed."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.remat.units import Units
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE
from memprof.trace.step import Step, sum_at
from memprof.units import format_bytes


@dataclass
class Life:
    """One interval during which a storage is in memory.

    Attributes:
        storage: The storage.
        born: Index of the recomputed operator that allocates it; -1 for the recorded life.
        ended: Last operator to run before it is freed: an operator of the step, or the index of a recomputed one plus
            the number of operators; -1 for as long as recorded.
    """

    storage: int
    born: int
    ended: int = -1


@dataclass
class Course:
    """The simulated course of a step.

    Attributes:
        source: The operator that each recomputed one repeats.
        before: The operator of the step before which it runs.
        lives: Every life.
        reads: Life that each operator of the step reads if not the recorded one, by operator and storage.
        again_reads: Lives, or storages of the step as negative numbers, that each recomputed operator reads.
        again_writes: Lives that each allocates or changes.
        dropped: Number of storages dropped.
    """

    source: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    reads: dict[tuple[int, int], int] = field(default_factory=dict)
    again_reads: list[list[int]] = field(default_factory=list)
    again_writes: list[list[int]] = field(default_factory=list)
    dropped: int = 0


class Simulation:
    """Simulates a step operator by operator."""

    def __init__(self, step: Step, units: Units, budget_bytes: int, heuristic: str, at_once: set[int]) -> None:
        """Prepares a run.

        Args:
            step: The step.
            units: Eviction candidates.
            budget_bytes: Maximum bytes at once; 0 for no limit.
            heuristic: Eviction heuristic.
            at_once: Storages that are dropped once nothing else references them.
        """
        self._step, self._units, self._budget = step, units, budget_bytes or 1 << 62
        self._is_stale_cheap = heuristic == "eq-class"
        self._at_once = at_once
        storages, total = step.storages, len(step.ops)
        self._size: list[int] = storages.allocated_bytes.tolist()
        self._created: list[int] = storages.created_op_id.tolist()
        freed = np.where(storages.freed_op_id == NONE, total, storages.freed_op_id)
        self._freed: list[int] = freed.tolist()
        self._held: list[int] = units.held.tolist()
        self._may_go: list[bool] = units.may_go.tolist()
        self._cost: list[float] = units.cost_us.tolist()
        chosen = np.flatnonzero(units.may_go)
        born = sum_at(storages.created_op_id[chosen], storages.allocated_bytes[chosen], total)
        gone = sum_at(storages.freed_op_id[chosen], storages.allocated_bytes[chosen], total)
        after = np.cumsum(born - gone)
        live = live_bytes(step)
        self._floor: list[int] = (live.during - (after + gone)).tolist()
        self._floor_after: list[int] = (live.after - after).tolist()
        self._life = [-1] * len(storages)  # the life in memory
        self._clock = 0.0
        self._used: list[float] = [0.0] * len(storages)
        self._locks = [0] * len(storages)
        self._live = 0
        self._pool: set[int] = set()
        self._dropped: set[int] = set()
        self._heirs: dict[int, list[int]] = {}
        self._made_together: dict[int, list[int]] = {}  # results of one operator that are never changed afterwards
        for storage, made_by in units.makers.items():
            if len(made_by) == 1 and self._may_go[storage]:
                self._made_together.setdefault(made_by[0], []).append(storage)
        for storage, sources in units.sources.items():
            for source in sources:
                self._heirs.setdefault(source, []).append(storage)
        self._course = Course()
        self._last = 0
        self._now = 0

    def run(self) -> Course:
        """Returns the simulated course.

        Raises:
            PolicyError: An operator does not fit even with everything possible dropped.
        """
        step, course = self._step, self._course
        total = len(step.ops)
        reads: list[list[int]] = [[] for _ in range(total)]
        for op_id, storage in zip(step.uses.op_id.tolist(), step.uses.storage_id.tolist(), strict=True):
            reads[op_id].append(storage)
        born: dict[int, list[int]] = {}
        dies: dict[int, list[int]] = {}
        for storage in np.flatnonzero(self._units.may_go).tolist():
            born.setdefault(self._created[storage], []).append(storage)
            dies.setdefault(self._freed[storage], []).append(storage)
        free_from: list[tuple[int, int]] = []
        phases = step.ops.phase.tolist()
        for now in range(total):
            self._now = now
            while free_from and free_from[0][0] < now:
                storage = heapq.heappop(free_from)[1]
                if self._life[storage] >= 0:
                    self._pool.add(storage)
                    if storage in self._at_once:
                        self._drop(storage)
            needed = [storage for storage in reads[now] if self._may_go[storage] and self._created[storage] < now]
            if phases[now] != "backward":
                needed = [storage for storage in needed if self._life[storage] >= 0]
            for storage in needed:
                self._locks[storage] += 1
            for storage in needed:
                if self._life[storage] < 0 and self._freed[storage] >= now:
                    self._remake(storage)
            self._make_room(self._floor[now] + sum(self._size[s] for s in born.get(now, ())), now)
            for storage in born.get(now, ()):
                self._begin(storage, Life(storage, -1))
                heapq.heappush(free_from, (self._held[storage], storage))
            self._clock += self._cost[now]
            self._last = now
            for storage in needed:
                self._locks[storage] -= 1
                self._used[storage] = self._clock
                life = self._life[storage]
                if life >= 0 and course.lives[life].born >= 0:
                    course.reads[now, storage] = life
            for storage in dies.get(now, ()):
                if self._life[storage] >= 0:
                    last = course.lives[self._life[storage]]
                    if last.born >= 0:
                        last.ended = now
                    self._end(storage)
                self._dropped.discard(storage)
        return course

    def _begin(self, storage: int, life: Life) -> None:
        self._life[storage] = len(self._course.lives)
        self._course.lives.append(life)
        self._live += self._size[storage]
        self._used[storage] = self._clock
        self._dropped.discard(storage)

    def _end(self, storage: int) -> None:
        self._life[storage] = -1
        self._live -= self._size[storage]
        self._pool.discard(storage)

    def _drop(self, storage: int) -> None:
        self._course.lives[self._life[storage]].ended = self._last
        self._end(storage)
        self._dropped.add(storage)
        self._course.dropped += 1

    def _make_room(self, floor: int, op_id: int) -> None:
        """Drops storages until an operator fits.

        Args:
            floor: Bytes that cannot be dropped.
            op_id: The operator.

        Raises:
            PolicyError: It does not fit.
        """
        while self._live + floor > self._budget:
            victims = [storage for storage in self._pool if not self._locks[storage]]
            if not victims:
                raise PolicyError(
                    f"remat cannot stay within {format_bytes(self._budget)}: {self._step.ops.name[op_id]} in "
                    f"{self._step.ops.phase[op_id]} needs {format_bytes(self._live + floor)} with everything "
                    "possible dropped. Set a larger budget, or add a policy that reduces the rest."
                )
            self._drop(min(victims, key=self._h))

    def _h(self, storage: int) -> tuple[float, int]:
        cost = self._units.remake_us(storage)
        ways = (self._units.sources, self._heirs) if self._is_stale_cheap else (self._units.sources,)
        for way in ways:
            seen: set[int] = set()
            pending = [storage]
            while pending and len(seen) < 64:
                for other in way.get(pending.pop(), ()):
                    if other not in seen and self._is_gone(other):
                        seen.add(other)
                        cost += self._units.remake_us(other)
                        pending.append(other)
        stale = self._clock - self._used[storage] + 1e-3 if self._is_stale_cheap else 1.0
        return cost / (self._size[storage] * stale), storage

    def _is_gone(self, storage: int) -> bool:
        """Returns whether a storage would have to be recomputed for a reader."""
        if not self._units.can_remake[storage] or self._life[storage] >= 0:
            return False
        return storage in self._dropped or self._created[storage] < self._now > self._freed[storage]

    def _remake(self, target: int) -> None:
        """Recomputes a storage, after whatever that needs."""
        course, units = self._course, self._units
        stack = [target]
        self._lock(target, 1)
        while stack:
            storage = stack[-1]
            missing = next((s for s in units.sources[storage] if self._is_gone(s)), None)
            if missing is not None:
                self._lock(missing, 1)
                stack.append(missing)
                continue
            stack.pop()
            number = -1
            for op_id in units.makers[storage]:
                extra = self._size[storage] if number < 0 else 0
                between = self._floor_after[self._now - 1] if self._now else self._floor[0]
                self._make_room(between + extra + int(self._step.ops.workspace_bytes[op_id]), op_id)
                first = number < 0
                number = len(course.source)
                course.source.append(op_id)
                course.before.append(self._now)
                self._clock += self._cost[op_id]
                if first:
                    self._begin(storage, Life(storage, number))
                    if self._may_go[storage]:
                        self._pool.add(storage)
                course.again_reads.append(
                    [self._life[s] if self._life[s] >= 0 else -1 - s for s in units.sources[storage]]
                )
                course.again_writes.append([self._life[storage]])
                for other in self._made_together.get(op_id, ()) if first else ():
                    if other != storage and other in self._dropped:
                        self._begin(other, Life(other, number))
                        self._pool.add(other)
                        course.again_writes[-1].append(self._life[other])
                self._last = len(self._step.ops) + number
            self._lock(storage, -1)

    def _lock(self, storage: int, count: int) -> None:
        """Locks a storage's inputs, or unlocks them and frees those recomputed only for it."""
        for source in self._units.sources[storage]:
            self._locks[source] += count
            life = self._life[source]
            if not self._locks[source] and life >= 0 and not self._may_go[source]:
                self._course.lives[life].ended = self._last
                self._end(source)
