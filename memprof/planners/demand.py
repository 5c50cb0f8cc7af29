"""The schedule that a choice of dropped values leads to: what is missing is made again when it is asked for."""

from __future__ import annotations

import numpy as np

from memprof.planners.graph import Graph
from memprof.trace.schema import Bools, Ints


def make_on_demand(graph: Graph, dropped: Bools) -> Ints:
    """Drops values after their last read in forward, and makes them again when an operator asks for them.

    What is made again stays until its last reader; what is made again on the way to it and has no reader of its own
    left is dropped with the next operator of the step. This is Chen 2016's recomputation (Training Deep Nets with
    Sublinear Memory Cost, section 3) for any choice of values: what lies between two kept values is a segment.

    Args:
        graph: The step.
        dropped: Which values are dropped, shape ``(values,)``; those nobody can make again stay anyway. One that
            only forward reads is held for what is made from it again, unless it is dropped, too.

    Returns:
        The schedule: operators in the order in which they run.
    """
    return Demand(graph).schedule(dropped)


class Demand:
    """Makes schedules of one graph; what they share is looked up once."""

    def __init__(self, graph: Graph) -> None:
        """Prepares a graph."""
        self._graph = graph
        self._reads = graph.reads_by_op()
        self._made = graph.values_by_op()
        self._maker = graph.value_op.tolist()
        self._taken = graph.taken_from.tolist()
        self._can_repeat = graph.can_repeat.tolist()
        last_read = graph.value_op.copy()
        np.maximum.at(last_read, graph.read_value, graph.read_op)
        self._last_read = last_read.tolist()
        # Values that may be dropped, by the operator after which they are.
        last_forward = graph.last_forward_read()
        candidates = np.flatnonzero(graph.can_repeat[graph.value_op])
        self._drop_after: dict[int, list[int]] = {}
        for value in candidates.tolist():
            self._drop_after.setdefault(int(last_forward[value]), []).append(value)

    def schedule(self, dropped: Bools) -> Ints:
        """Returns the schedule of one choice; see make_on_demand."""
        is_dropped = dropped.tolist()
        is_alive = [False] * self._graph.values
        runs: list[int] = []
        for op_id in range(self._graph.ops):
            if not self._can_repeat[op_id]:
                passing = self._make(op_id, is_alive, runs)
                for value in passing:
                    if self._last_read[value] <= op_id:
                        is_alive[value] = False
            self._run(op_id, is_alive, runs)
            for value in self._drop_after.get(op_id, ()):
                if is_dropped[value]:
                    is_alive[value] = False
        return np.array(runs, dtype=np.int64)

    def _run(self, op_id: int, is_alive: list[bool], runs: list[int]) -> None:
        runs.append(op_id)
        for value in self._made[op_id]:
            is_alive[value] = True
            if self._taken[value] >= 0:
                is_alive[self._taken[value]] = False

    def _make(self, op_id: int, is_alive: list[bool], runs: list[int]) -> list[int]:
        """Runs again what an operator needs; returns the values this made."""
        made: list[int] = []
        stack = [op_id]
        while stack:
            current = stack[-1]
            missing = [value for value in self._reads[current] if not is_alive[value]]
            if missing:
                stack.extend(self._maker[value] for value in reversed(missing))
                continue
            stack.pop()
            if current != op_id and not all(is_alive[value] for value in self._made[current]):
                self._run(current, is_alive, runs)
                made.extend(self._made[current])
        return made
