"""Simulates a step within a budget: what is dropped, when, and what is recomputed."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from memprof.errors import PolicyError
from memprof.policies.evict.outline import Outline
from memprof.policies.evict.victims import Facts, Victims
from memprof.units import format_bytes

#: Time until the next use of what is not used again, in microseconds.
_NEVER_US = 1e12
#: Most recomputation, as a multiple of the step's work and of its operators. Long chains, such as a network over many
#: time steps, may otherwise be recomputed exponentially often where little more than one operator's memory is left.
_MOST_AGAIN = 10


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
        dropped: The storages dropped, in order.
        again_us: Time of the recomputed operators.
    """

    source: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    again_reads: list[list[int]] = field(default_factory=list)
    again_writes: list[list[int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    again_us: float = 0.0


@dataclass(frozen=True)
class Rule:
    """How the simulation chooses victims.

    Attributes:
        heuristic: A name in ``HEURISTICS``.
        foresight: None to prefer stale storages, as without knowledge of the step. Else the time until the next use
            takes the place of staleness, to this power.
        weights: Factors by which the cost of evicting single storages counts more.
    """

    heuristic: str
    foresight: float | None = None
    weights: Mapping[int, float] = field(default_factory=dict)


class Simulation:
    """Simulates a step operator by operator."""

    def __init__(
        self,
        outline: Outline,
        budget_bytes: int,
        rule: Rule,
        at_once: Set[int] = frozenset(),
        most_again_us: float = math.inf,
    ) -> None:
        """Prepares a run.

        Args:
            outline: The step.
            budget_bytes: Maximum bytes at once; 0 for no limit.
            rule: How victims are chosen.
            at_once: Storages that are dropped once nothing else references them.
            most_again_us: Most time of recomputed operators; the run ends where it takes more.
        """
        self._most_again_us = min(most_again_us, _MOST_AGAIN * sum(outline.cost_us))
        self._most_again = _MOST_AGAIN * len(outline.cost_us)
        self._outline, self._budget, self._rule = outline, budget_bytes or 1 << 62, rule
        self._at_once = at_once
        count = len(outline.size_bytes)
        self._size = outline.size_bytes
        self._life = [-1] * count  # the life in memory
        self._used = [0.0] * count
        self._locks = [0] * count
        self._known_until, self._made_together = outline.known_until, outline.made_together
        self._victims = Victims(self._facts(), rule.heuristic)
        self._course = Course()
        self._clock = 0.0
        self._live = 0
        self._last = 0
        self._now = 0

    def run(self) -> Course:
        """Returns the simulated course.

        Raises:
            PolicyError: An operator does not fit even with everything possible dropped, or too much is recomputed.
        """
        outline, locks = self._outline, self._locks
        born_at, dies_at, offered_at = outline.events
        for now, (born, needed) in enumerate(zip(born_at, outline.reads, strict=True)):
            self._now = now
            for storage in offered_at[now]:
                if self._life[storage] >= 0:  # nothing but autograd holds it any more
                    self._victims.add(storage)
                    if storage in self._at_once:
                        self._drop(storage)
            for storage in needed:
                locks[storage] += 1
            for storage in needed:
                if self._life[storage] < 0 and self._is_saved(storage):
                    self._recompute(storage)
            self._make_room(outline.floor_bytes[now] + sum(self._size[storage] for storage in born), now)
            self._clock += outline.cost_us[now]
            self._last = now
            for storage in born:
                self._begin(storage, Life(storage, -1))
            for storage in needed:
                locks[storage] -= 1
                self._used[storage] = self._clock
            for storage in dies_at[now]:
                if (life := self._life[storage]) >= 0:
                    # A recorded life ends as recorded.
                    self._end(storage, now if self._course.lives[life].born >= 0 else -1)
        return self._course

    def _facts(self) -> Facts[int]:
        outline, rule, locks = self._outline, self._rule, self._locks
        weights, size_bytes = rule.weights, self._size
        return Facts(
            own_us=outline.recompute_us,
            sources=outline.sources.__getitem__,
            dependants=lambda storage: outline.dependants.get(storage, ()),
            is_gone=self._is_gone,
            may_go=lambda storage: not locks[storage],
            size_bytes=lambda storage: size_bytes[storage] / weights.get(storage, 1.0),
            used_us=self._used.__getitem__ if rule.foresight is None else self._used_in_future,
        )

    def _used_in_future(self, storage: int) -> float:
        """Returns a time as far in the past as the next use lies ahead, to the power of the rule's foresight."""
        readers, starts = self._outline.readers.get(storage, []), self._outline.start_us
        number = bisect_left(readers, self._now)
        ahead_us = starts[readers[number]] - starts[self._now] if number < len(readers) else _NEVER_US
        return self._clock - float(max(ahead_us, 0.0) ** (self._rule.foresight or 1.0))

    def _is_saved(self, storage: int) -> bool:
        outline = self._outline
        return outline.may_go[storage] and outline.created[storage] <= self._now <= outline.freed[storage]

    def _is_gone(self, storage: int) -> bool:
        """Returns whether a storage would have to be recomputed for a reader."""
        outline = self._outline
        if self._life[storage] >= 0 or not outline.can_recompute[storage]:
            return False
        if not outline.created[storage] < self._now <= self._known_until[storage]:
            return False
        return outline.may_go[storage] or outline.freed[storage] < self._now

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
        self._course.dropped.append(storage)

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
                    f"remat cannot stay within {format_bytes(self._budget)}: {self._outline.what[op_id]} needs "
                    f"{format_bytes(self._live + floor)} with everything possible dropped. Set a larger budget, or "
                    "add a policy that reduces the rest."
                )
            self._drop(victim)

    def _recompute(self, target: int) -> None:
        sources, stack = self._outline.sources, [target]
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
        course, outline, now = self._course, self._outline, self._now
        between = outline.floor_after_bytes[now - 1] if now else outline.floor_bytes[0]
        for op_id in outline.makers[storage]:
            is_first = self._life[storage] < 0
            extra = self._size[storage] if is_first else 0
            self._make_room(between + extra + outline.workspace_bytes[op_id], op_id)
            number = len(course.source)
            course.source.append(op_id)
            course.before.append(now)
            self._clock += outline.cost_us[op_id]
            course.again_us += outline.cost_us[op_id]
            if course.again_us > self._most_again_us or number > self._most_again:
                raise PolicyError(
                    f"remat would compute most of the step over and over within {format_bytes(self._budget)}: more "
                    f"than {course.again_us / max(sum(outline.cost_us), 1e-9):.1f} times its work. Set a larger budget."
                )
            written = [storage]
            if is_first:
                written += [other for other in self._made_together.get(op_id, ()) if self._is_needed(other, storage)]
                for made in written:
                    self._begin(made, Life(made, number))
            sources = outline.sources[storage]
            course.again_reads.append([self._life[s] if self._life[s] >= 0 else -1 - s for s in sources])
            course.again_writes.append([self._life[made] for made in written])
            self._last = len(outline.cost_us) + number

    def _is_needed(self, other: int, storage: int) -> bool:
        """Returns whether a further result of a repeated operator is kept: it is gone, and something needs it."""
        return other != storage and self._is_gone(other) and (self._is_saved(other) or self._locks[other] > 0)

    def _lock(self, storage: int, count: int) -> None:
        """Locks a storage's inputs, or unlocks them and frees those recomputed only for it."""
        for source in self._outline.sources[storage]:
            self._locks[source] += count
            if not self._locks[source] and self._life[source] >= 0 and not self._is_saved(source):
                self._end(source, self._last)
