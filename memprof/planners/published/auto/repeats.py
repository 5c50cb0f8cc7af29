"""A schedule modified move by move: which operators run again before which, and the bytes at every stage.

A *stage* is an operator of the step together with what runs again just before it, in the step's order. That is the
space of schedules of Jain 2020 (Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, section
4.2): an operator repeats at most once per stage. ``replay`` measures a whole schedule; a move here costs only the
lifetimes it changes. Both give the same peak, which the tests check.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import numpy as np

from memprof.planners.graph.graph import Graph
from memprof.planners.graph.schedule import replay
from memprof.trace.schema import NONE, Ints

#: An operator and the stage it repeats in.
Repeat = tuple[int, int]


class Repeats:
    """Which operators run again in which stage; initially the recorded step.

    Attributes:
        graph: The step.
        stages: By operator, the stages in which it repeats, in order.
        again: By stage, the operators that repeat in it, in order.
        extra_us: Time of all repeats.
        bytes: Peak allocated bytes in each stage, shape ``(ops,)``.
        read: By operator, the values it reads.
        made: By operator, the values it makes.
        readers: By value, the operators that read it.
        maker: By value, the operator that makes it.
        together: By operator, those that must repeat in the same stage, because it overwrites, or must read first, a
            value that another operator changes in place.
    """

    def __init__(self, graph: Graph) -> None:
        ops = graph.ops
        self.graph = graph
        self.stages: list[list[int]] = [[] for _ in range(ops)]
        self.again: list[list[int]] = [[] for _ in range(ops)]
        self.extra_us = 0.0
        self.read = graph.reads_by_op()
        self.made = graph.values_by_op()
        self.maker: list[int] = graph.value_op.tolist()
        self.readers: list[list[int]] = [[] for _ in range(graph.values)]
        for op_id, read in enumerate(self.read):
            for value in read:
                self.readers[value].append(op_id)
        self.cost_us: list[float] = graph.cost_us.tolist()
        self.size: list[int] = graph.value_bytes.tolist()
        self.taker = [NONE] * graph.values
        for value, source in enumerate(graph.taken_from.tolist()):
            if source != NONE:
                self.taker[source] = self.maker[value]
        self.together = [
            [self.maker[value] for value in self.read[op_id] if self.taker[value] != NONE] for op_id in range(ops)
        ]
        self.takers: list[list[int]] = [[] for _ in range(ops)]
        for op_id, others in enumerate(self.together):
            for other in others:
                self.takers[other].append(op_id)

        self._unit = ops + 1
        # The recording may hold a value past its last read, or past the step.
        self._held = [ops if op_id == NONE else op_id for op_id in graph.value_freed_op.tolist()]
        self._made_bytes = [sum(self.size[value] for value in made) for made in self.made]
        workspace, floor = graph.workspace_bytes, graph.floor_bytes
        self._own = (workspace + floor).tolist()
        self._own_again: list[int] = workspace.tolist()
        self._floor_between = [int(floor[0]) if ops else 0, *graph.floor_after_bytes[:-1].tolist()]
        self._lives: list[list[tuple[int, int]]] = [[] for _ in range(graph.values)]
        self._entering = [0] * ops
        # By stage and run within it: bytes freed after the run, and bytes it reuses in place.
        self._after: list[dict[int, int]] = [{} for _ in range(ops)]
        self._taken: list[dict[int, int]] = [{} for _ in range(ops)]
        self._inner = [0] * ops
        self.bytes: Ints = np.zeros(ops, dtype=np.int64)
        for value in range(graph.values):
            self._lives[value] = lives = self._lives_of(value)
            self._account(value, lives, 1)
        for stage in range(ops):
            self._measure(stage)

    @property
    def peak_bytes(self) -> int:
        """Peak allocated bytes."""
        return int(self.bytes.max(initial=0))

    def runs(self) -> Ints:
        """Returns the schedule."""
        order: list[int] = []
        for stage, again in enumerate(self.again):
            order.extend(again)
            order.append(stage)
        return np.array(order, dtype=np.int64)

    def repeats(self) -> list[Repeat]:
        """Lists the repeated operators with their stages."""
        return [(op_id, stage) for stage, again in enumerate(self.again) for op_id in again]

    def is_alive(self, value: int, stage: int) -> bool:
        """Returns whether a value is live from the start of a stage until its operator runs."""
        births, ends = self._births(value), self._lives[value]
        life = bisect_right(births, stage) - 1
        return life >= 0 and births[life] < stage and ends[life][1] >= stage * self._unit

    def is_kept(self, value: int, stage: int) -> bool:
        """Returns whether a value is live while a stage's own operator runs, which does not make it."""
        births = self._births(value)
        life = bisect_right(births, stage) - 1
        return life >= 0 and self._lives[value][life][1] >= stage * self._unit + stage

    def needed_in(self, value: int) -> list[int]:
        """Returns the stages in which a value is read, in order."""
        needed = {stage for reader in self.readers[value] for stage in (reader, *self.stages[reader])}
        return sorted(needed)

    def gap_around(self, value: int, stage: int) -> tuple[int, int] | None:
        """Returns the stages of the reads that bound a lifetime gap around a stage; None for none."""
        births, lives, unit = self._births(value), self._lives[value], self._unit
        life = bisect_left(births, stage) - 1
        if life < 0 or lives[life][1] < (stage + 1) * unit:
            return None
        before, after = births[life], lives[life][1] // unit
        for reader in self.readers[value]:
            for needed in (reader, *self.stages[reader]):
                if needed == stage:
                    return None
                if before < needed < stage:
                    before = needed
                elif stage < needed < after:
                    after = needed
        return (before, after) if after < self.graph.ops else None

    def is_useless(self, op_id: int, stage: int) -> bool:
        """Returns whether nothing reads what a repeat makes."""
        return all(
            self._lives[value][bisect_right(self._births(value), stage) - 1][1] == stage * self._unit + op_id
            for value in self.made[op_id]
        )

    def toggle(self, repeats: list[Repeat]) -> None:
        """Adds the repeats that are absent and removes those present; applied twice, it undoes itself."""
        changed: set[int] = set()
        touched: set[int] = set()
        for op_id, stage in repeats:
            stages, again = self.stages[op_id], self.again[stage]
            if stage in stages:
                stages.remove(stage)
                again.remove(op_id)
                self.extra_us -= self.cost_us[op_id]
            else:
                insort(stages, stage)
                insort(again, op_id)
                self.extra_us += self.cost_us[op_id]
            changed.update(self.made[op_id])
            changed.update(self.read[op_id])
            touched.add(stage)
        for value in changed:
            old, new = self._lives[value], self._lives_of(value)
            if old == new:
                continue
            self._lives[value] = new
            gone = [life for life in old if life not in new]
            come = [life for life in new if life not in old]
            self._account(value, gone, -1)
            self._account(value, come, 1)
            for born, end in (*gone, *come):
                touched.add(born)
                touched.add(end // self._unit)
        touched.discard(self.graph.ops)
        for stage in touched:
            self._measure(stage)

    def load(self, repeats: list[Repeat]) -> None:
        """Switches to another schedule."""
        now, wanted = set(self.repeats()), set(repeats)
        self.toggle(sorted(now ^ wanted))
        self.extra_us = sum(self.cost_us[op_id] for op_id, _ in sorted(wanted))

    def _births(self, value: int) -> list[int]:
        maker = self.maker[value]
        return [maker, *self.stages[maker]]

    def _lives_of(self, value: int) -> list[tuple[int, int]]:
        """Returns for each lifetime the stage of its birth, and its end: the stage times the unit, plus the run."""
        births, unit = self._births(value), self._unit
        maker = births[0]
        ends = [birth * unit + maker for birth in births]
        held = self._held[value]
        if len(births) == 1:
            end = max(ends[0], held * unit + held)
            for reader in self.readers[value]:
                stages = self.stages[reader]
                end = max(end, (stages[-1] if stages else reader) * unit + reader)
            return [(maker, end)]
        life = bisect_right(births, held) - 1
        ends[life] = max(ends[life], held * unit + held)
        for reader in self.readers[value]:
            for stage in (reader, *self.stages[reader]):
                life = bisect_right(births, stage) - 1
                key = stage * unit + reader
                ends[life] = max(ends[life], key)
        return list(zip(births, ends, strict=True))

    def _account(self, value: int, lives: list[tuple[int, int]], sign: int) -> None:
        """Adds lifetimes of a value to the stages they touch, or subtracts them."""
        size, unit, ops, taker = sign * self.size[value], self._unit, self.graph.ops, self.taker[value]
        for born, end in lives:
            last, run = divmod(end, unit)
            if born < last:
                self.bytes[born + 1 : last] += size
                if last == ops:
                    continue
                self._entering[last] += size
            ended = self._taken[last] if run == taker else self._after[last]
            ended[run] = ended.get(run, 0) + size

    def _measure(self, stage: int) -> None:
        live, after, taken = self._entering[stage], self._after[stage], self._taken[stage]
        again = self.again[stage]
        highest = 0
        if again:
            between = self._floor_between[stage]
            for op_id in again:
                live += self._made_bytes[op_id] - taken.get(op_id, 0)
                highest = max(highest, live + self._own_again[op_id] + between)
                live -= after.get(op_id, 0)
        live += self._made_bytes[stage] - taken.get(stage, 0)
        highest = max(highest, live + self._own[stage])
        self.bytes[stage] += highest - self._inner[stage]
        self._inner[stage] = highest


def repeats_in(graph: Graph, runs: Ints) -> list[Repeat]:
    """Extracts which operators repeat in which stage from a schedule; twice in one stage counts once."""
    again = replay(graph, runs).is_again
    stage = np.minimum.accumulate(np.where(again, graph.ops, runs)[::-1])[::-1]
    return sorted({(int(op_id), int(at)) for op_id, at in zip(runs[again], stage[again], strict=True)})
