"""Builds a schedule operator by operator, and recomputes missing inputs."""

from __future__ import annotations

import sys

import numpy as np

from memprof.planners.graph.graph import Graph
from memprof.trace.schema import Ints


class Readers:
    """Lookup tables for building schedules of one graph, as lists.

    Attributes:
        ops: Number of operators.
        reads: Values each operator reads.
        made: Values each operator makes.
        maker: The operator that makes each value.
        taken: The value whose memory each reuses in place, NONE for none.
        last_read: The last operator that reads each value, its own where none does.
    """

    def __init__(self, graph: Graph) -> None:
        """Builds the tables."""
        self.ops = graph.ops
        self.reads = graph.reads_by_op()
        self.made = graph.values_by_op()
        self.maker: list[int] = graph.value_op.tolist()
        self.taken: list[int] = graph.taken_from.tolist()
        last_read = graph.value_op.copy()
        np.maximum.at(last_read, graph.read_value, graph.read_op)
        self.last_read: list[int] = last_read.tolist()


class Writer:
    """One schedule under construction.

    Attributes:
        runs: The operators so far, in order.
        is_alive: Whether each value is live; set an entry to False to drop the value.
    """

    def __init__(self, readers: Readers) -> None:
        """Starts before the first operator."""
        self.runs: list[int] = []
        self.is_alive = [False] * len(readers.maker)
        self._reads, self._made = readers.reads, readers.made
        self._maker, self._taken = readers.maker, readers.taken

    def run(self, op_id: int) -> None:
        """Runs an operator; values it changes in place are no longer live."""
        self.runs.append(op_id)
        for value in self._made[op_id]:
            self.is_alive[value] = True
            if self._taken[value] >= 0:
                self.is_alive[self._taken[value]] = False

    def supply(self, op_id: int, most_runs: int = sys.maxsize) -> list[int]:
        """Recomputes an operator's missing inputs, recursively, but does not run the operator itself.

        Args:
            op_id: The operator.
            most_runs: Schedule length at which to abort.

        Returns:
            The recomputed values.
        """
        made: list[int] = []
        stack = [op_id]
        while stack and len(self.runs) <= most_runs:
            current = stack[-1]
            missing = [value for value in self._reads[current] if not self.is_alive[value]]
            if missing:
                stack.extend(self._maker[value] for value in reversed(missing))
                continue
            stack.pop()
            if current != op_id and not all(self.is_alive[value] for value in self._made[current]):
                self.run(current)
                made.extend(self._made[current])
        return made

    def make(self, value: int) -> None:
        """Recomputes a value if it is missing."""
        if not self.is_alive[value]:
            self.supply(self._maker[value])
            self.run(self._maker[value])

    def schedule(self) -> Ints:
        """Returns the schedule built so far."""
        return np.array(self.runs, dtype=np.int64)
