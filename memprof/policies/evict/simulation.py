"""Simulates the runtime on a recorded step within a budget: what is dropped, when, and what is recomputed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.evict.victims import Facts, Victims
from memprof.policies.evict.units import Units
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
        again_reads: Lives, or storages of the step as negative numbers, that each recomputed operator reads.
        again_writes: Lives that each allocates or changes.
        dropped: Number of storages dropped.
    """

    source: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
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
        self._at_once = at_once
        storages, total = step.storages, len(step.ops)
        self._size: list[int] = storages.allocated_bytes.tolist()
        self._cost: list[float] = units.cost_us.tolist()
        self._may_go: list[bool] = units.may_go.tolist()
        self._created: list[int] = storages.created_op_id.tolist()
        self._freed: list[int] = np.where(storages.freed_op_id == NONE, total, storages.freed_op_id).tolist()
        self._life = [-1] * len(storages)  # the life in memory
        self._used = [0.0] * len(storages)
        self._locks = [0] * len(storages)
        self._known_until = self._known_times()
        self._victims = Victims(self._facts(), heuristic)
        chosen = np.flatnonzero(units.may_go)
        created, freed = storages.created_op_id[chosen], storages.freed_op_id[chosen]
        born = sum_at(created, storages.allocated_bytes[chosen], total)
        gone = sum_at(freed, storages.allocated_bytes[chosen], total)
        after = np.cumsum(born - gone)
        live = live_bytes(step)
        self._floor: list[int] = (live.during - (after + gone)).tolist()
        self._floor_after: list[int] = (live.after - after).tolist()
        self._born: list[list[int]] = [[] for _ in range(total)]
        self._dies: list[list[int]] = [[] for _ in range(total + 1)]
        self._free_from: list[list[int]] = [[] for _ in range(total + 1)]
        for storage in chosen.tolist():
            self._born[self._created[storage]].append(storage)
            self._dies[self._freed[storage]].append(storage)
            self._free_from[int(units.held[storage]) + 1].append(storage)
        self._made_together: dict[int, list[int]] = {}  # results of one operator that are never changed afterwards
        for storage, made_by in units.makers.items():
            if len(made_by) == 1 and units.can_recompute[storage]:
                self._made_together.setdefault(made_by[0], []).append(storage)
        self._course = Course()
        self._clock = 0.0
        self._live = 0
        self._last = 0
        self._now = 0

    def run(self) -> Course:
        """Returns the simulated course.

        Raises:
            PolicyError: An operator does not fit even with everything possible dropped.
        """
        reads = self._candidates_read()
        for now, born in enumerate(self._born):
            self._now = now
            self._offer(now)
            needed = reads[now]
            if self._step.ops.phase[now] != "backward":
                needed = [storage for storage in needed if self._life[storage] >= 0]
            for storage in needed:
                self._locks[storage] += 1
            for storage in needed:
                if self._life[storage] < 0 and self._is_saved(storage):
                    self._recompute(storage)
            self._make_room(self._floor[now] + sum(self._size[storage] for storage in born), now)
            self._clock += self._cost[now]
            self._last = now
            for storage in born:
                self._begin(storage, Life(storage, -1))
            for storage in needed:
                self._locks[storage] -= 1
                self._used[storage] = self._clock
            for storage in self._dies[now]:
                if (life := self._life[storage]) >= 0:
                    # A recorded life ends as recorded.
                    self._end(storage, now if self._course.lives[life].born >= 0 else -1)
        return self._course

    def _candidates_read(self) -> list[list[int]]:
        """Returns the candidates made before that each operator of the step uses."""
        uses = self._step.uses
        is_ours = self._units.may_go[uses.storage_id]
        is_ours &= self._step.storages.created_op_id[uses.storage_id] < uses.op_id
        reads: list[list[int]] = [[] for _ in range(len(self._step.ops))]
        for op_id, storage in zip(uses.op_id[is_ours].tolist(), uses.storage_id[is_ours].tolist(), strict=True):
            reads[op_id].append(storage)
        return reads

    def _offer(self, now: int) -> None:
        """Makes candidates of the storages that nothing else holds from an operator on."""
        for storage in self._free_from[now]:
            if self._life[storage] >= 0:
                self._victims.add(storage)
                if storage in self._at_once:
                    self._drop(storage)

    def _facts(self) -> Facts[int]:
        """Returns what victims are chosen by."""
        dependants: dict[int, list[int]] = {}
        for storage, sources in self._units.sources.items():
            for source in sources:
                dependants.setdefault(source, []).append(storage)
        return Facts(
            own_us=self._units.recompute_us,
            sources=self._units.sources.__getitem__,
            dependants=lambda storage: dependants.get(storage, ()),
            is_gone=self._is_gone,
            may_go=lambda storage: not self._locks[storage],
            size_bytes=self._size.__getitem__,
            used_us=self._used.__getitem__,
        )

    def _known_times(self) -> list[int]:
        """Returns how long the runtime tracks each storage: until it and all that was computed from it are freed."""
        units, until = self._units, self._freed.copy()
        for storage in sorted(units.makers, key=lambda made: units.makers[made][-1], reverse=True):
            for source in units.sources[storage]:
                until[source] = max(until[source], until[storage])
        return until

    def _is_saved(self, storage: int) -> bool:
        """Returns whether autograd keeps a storage, dropped or not."""
        return self._may_go[storage] and self._created[storage] <= self._now <= self._freed[storage]

    def _is_gone(self, storage: int) -> bool:
        """Returns whether a storage would have to be recomputed for a reader."""
        if self._life[storage] >= 0 or not self._units.can_recompute[storage]:
            return False
        if not self._created[storage] < self._now <= self._known_until[storage]:
            return False
        return self._may_go[storage] or self._freed[storage] < self._now

    def _begin(self, storage: int, life: Life) -> None:
        self._life[storage] = len(self._course.lives)
        self._course.lives.append(life)
        self._live += self._size[storage]
        self._used[storage] = self._clock
        self._victims.remade(storage)
        if life.born >= 0 and self._is_saved(storage):
            self._victims.add(storage)

    def _end(self, storage: int, ended: int) -> None:
        """Ends a storage's life after an operator, numbered as ``Life.ended``."""
        self._course.lives[self._life[storage]].ended = ended
        self._life[storage] = -1
        self._live -= self._size[storage]
        self._victims.remove(storage)

    def _drop(self, storage: int) -> None:
        self._end(storage, self._last)
        self._victims.evicted(storage)
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
            victim = self._victims.choose(self._clock)
            if victim is None:
                raise PolicyError(
                    f"remat cannot stay within {format_bytes(self._budget)}: {self._step.ops.name[op_id]} in "
                    f"{self._step.ops.phase[op_id]} needs {format_bytes(self._live + floor)} with everything "
                    "possible dropped. Set a larger budget, or add a policy that reduces the rest."
                )
            self._drop(victim)

    def _recompute(self, target: int) -> None:
        """Recomputes a storage, after whatever that needs."""
        sources, stack = self._units.sources, [target]
        self._lock(target, 1)
        while stack:
            storage = stack[-1]
            missing = next((source for source in sources[storage] if self._is_gone(source)), None)
            if missing is not None:
                self._lock(missing, 1)
                stack.append(missing)
                continue
            stack.pop()
            self._repeat(storage)
            self._lock(storage, -1)

    def _repeat(self, storage: int) -> None:
        """Runs the operators that write a storage again."""
        course, now = self._course, self._now
        between = self._floor_after[now - 1] if now else self._floor[0]
        for op_id in self._units.makers[storage]:
            is_first = self._life[storage] < 0
            extra = self._size[storage] if is_first else 0
            self._make_room(between + extra + int(self._step.ops.workspace_bytes[op_id]), op_id)
            number = len(course.source)
            course.source.append(op_id)
            course.before.append(now)
            self._clock += self._cost[op_id]
            written = [storage]
            if is_first:
                written += [other for other in self._made_together.get(op_id, ()) if self._is_needed(other, storage)]
                for made in written:
                    self._begin(made, Life(made, number))
            sources = self._units.sources[storage]
            course.again_reads.append([self._life[s] if self._life[s] >= 0 else -1 - s for s in sources])
            course.again_writes.append([self._life[made] for made in written])
            self._last = len(self._step.ops) + number

    def _is_needed(self, other: int, storage: int) -> bool:
        """Returns whether a further result of a repeated operator is kept: it is gone, and something needs it."""
        return other != storage and self._is_gone(other) and (self._is_saved(other) or self._locks[other] > 0)

    def _lock(self, storage: int, count: int) -> None:
        """Locks a storage's inputs, or unlocks them and frees those recomputed only for it."""
        for source in self._units.sources[storage]:
            self._locks[source] += count
            if not self._locks[source] and self._life[source] >= 0 and not self._is_saved(source):
                self._end(source, self._last)
