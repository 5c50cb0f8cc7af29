"""Turns what a chain planner decides, stage by stage, into the order of operators that carries it out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memprof.planners.graph import Graph
from memprof.planners.stages import Stage
from memprof.trace.schema import NONE, Ints


class Walk:
    """Writes a schedule down while it goes through stages, forward, forward again and backward.

    The first time through a stage, the step's own operators run. Later only what is asked for runs, so a decision
    that needs less than it pays for costs less than the planner believed.
    """

    def __init__(self, graph: Graph) -> None:
        """Starts before the first operator of a step."""
        self._graph = graph
        self._reads = graph.reads_by_op()
        self._made = graph.values_by_op()
        self._maker = graph.value_op.tolist()
        self._taken = graph.taken_from.tolist()
        last_read = graph.value_op.copy()
        np.maximum.at(last_read, graph.read_value, graph.read_op)
        self._last_read = last_read.tolist()
        self._is_alive = [False] * graph.values
        self._runs: list[int] = []
        self._next = 0

    def advance(self, stages: Iterable[Stage]) -> None:
        """Goes through stages and keeps nothing but what the last of them passes on."""
        passed = list(stages)
        self._reach(passed[-1].end_op, passed[-1].outputs)
        for stage in passed:
            self.drop(stage.values, but=passed[-1].outputs)

    def save(self, stage: Stage, kept: Iterable[int]) -> None:
        """Goes through one stage and keeps some of its values beside what it passes on."""
        wanted = {*kept, *stage.outputs}
        self._reach(stage.end_op, sorted(wanted))
        self.drop(stage.values, but=wanted)

    def backward(self, stage: Stage) -> None:
        """Runs the backward of a stage, and before each of its operators whatever that misses."""
        self.run_to(stage.backward_end_op)
        self.drop(value for value in stage.values if self._last_read[value] < stage.backward_end_op)

    def drop(self, values: Iterable[int], *, but: Iterable[int] = ()) -> None:
        """Lets go of values: whoever asks for them later has them made again."""
        kept = set(but)
        for value in values:
            if value not in kept:
                self._is_alive[value] = False

    def run_to(self, end_op: int) -> None:
        """Runs the step's own operators up to one, and before each of them whatever it misses."""
        for op_id in range(self._next, end_op):
            missing = [value for value in self._reads[op_id] if not self._is_alive[value]]
            while missing:
                self._make([self._maker[value] for value in reversed(missing)])
                missing = [value for value in self._reads[op_id] if not self._is_alive[value]]
            self._run(op_id)
        self._next = max(self._next, end_op)

    def runs(self) -> Ints:
        """Ends the walk with the rest of the step and returns the schedule."""
        self.run_to(self._graph.ops)
        return np.array(self._runs, dtype=np.int64)

    def _reach(self, end_op: int, values: Iterable[int]) -> None:
        if self._next < end_op:
            self.run_to(end_op)
        else:
            for value in values:
                if not self._is_alive[value]:
                    self._make([self._maker[value]])

    def _make(self, stack: list[int]) -> None:
        """Runs operators again, and before them what they miss."""
        while stack:
            current = stack[-1]
            missing = [value for value in self._reads[current] if not self._is_alive[value]]
            if missing:
                stack.extend(self._maker[value] for value in reversed(missing))
                continue
            stack.pop()
            if not all(self._is_alive[value] for value in self._made[current]):
                self._run(current)

    def _run(self, op_id: int) -> None:
        self._runs.append(op_id)
        for value in self._made[op_id]:
            self._is_alive[value] = True
            if self._taken[value] != NONE:
                self._is_alive[self._taken[value]] = False
