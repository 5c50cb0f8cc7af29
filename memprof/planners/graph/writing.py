"""Builds schedules operator by operator: from dropped values, or a chain planner's decisions."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np

from memprof.planners.graph.graph import Graph
from memprof.planners.graph.stages import Stage
from memprof.trace.schema import Bools, Ints


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


class Demand:
    """Drops values after their last read in forward, and recomputes them when an operator reads them.

    A recomputed value stays live until its last reader; an intermediate of a recompute without readers left is dropped
    at the next operator of the step. This is Chen 2016's recomputation (Training Deep Nets with Sublinear Memory Cost,
    section 3) for any set of values: what lies between two kept values is a segment.
    """

    def __init__(self, graph: Graph) -> None:
        self._readers = Readers(graph)
        self._can_repeat = graph.can_repeat.tolist()
        # Droppable values, by the operator after which they are dropped.
        last_forward = graph.last_forward_read()
        candidates = np.flatnonzero(graph.can_repeat[graph.value_op])
        self._drop_after: dict[int, list[int]] = {}
        for value in candidates.tolist():
            self._drop_after.setdefault(int(last_forward[value]), []).append(value)

    def schedule(self, dropped: Bools) -> Ints:
        """Returns the schedule of one set of dropped values, shape ``(values,)``.

        Values that cannot be recomputed are kept anyway. One that only forward reads is held for the recompute of its
        readers, unless it is dropped too.
        """
        is_dropped, last_read = dropped.tolist(), self._readers.last_read
        writer = Writer(self._readers)
        is_alive = writer.is_alive
        for op_id in range(self._readers.ops):
            if not self._can_repeat[op_id]:
                for value in writer.supply(op_id):
                    if last_read[value] <= op_id:
                        is_alive[value] = False
            writer.run(op_id)
            for value in self._drop_after.get(op_id, ()):
                if is_dropped[value]:
                    is_alive[value] = False
        return writer.schedule()


class Walk:
    """Builds a schedule by going through stages: forward, forward again and backward.

    The first pass through a stage runs the step's own operators. Later passes run only what is needed, so a decision
    can cost less than the planner assumed.
    """

    def __init__(self, graph: Graph) -> None:
        self._readers = Readers(graph)
        self._writer = Writer(self._readers)
        self._next = 0

    def advance(self, stages: Iterable[Stage]) -> None:
        """Goes through stages and keeps only the outputs of the last."""
        passed = list(stages)
        self._reach(passed[-1].end_op, passed[-1].outputs)
        for stage in passed:
            self.drop(stage.values, but=passed[-1].outputs)

    def save(self, stage: Stage, kept: Iterable[int]) -> None:
        """Goes through one stage and keeps some of its values along with its outputs."""
        wanted = {*kept, *stage.outputs}
        self._reach(stage.end_op, sorted(wanted))
        self.drop(stage.values, but=wanted)

    def backward(self, stage: Stage) -> None:
        """Runs the backward of a stage; missing inputs are recomputed before each operator."""
        self.run_to(stage.backward_end_op)
        self.drop(value for value in stage.values if self._readers.last_read[value] < stage.backward_end_op)

    def drop(self, values: Iterable[int], *, but: Iterable[int] = ()) -> None:
        """Drops values; later readers recompute them."""
        kept = set(but)
        for value in values:
            if value not in kept:
                self._writer.is_alive[value] = False

    def run_to(self, end_op: int) -> None:
        """Runs the step's own operators up to one; missing inputs are recomputed before each."""
        for op_id in range(self._next, end_op):
            self._writer.supply(op_id)
            self._writer.run(op_id)
        self._next = max(self._next, end_op)

    def runs(self) -> Ints:
        """Finishes the rest of the step and returns the schedule."""
        self.run_to(self._readers.ops)
        return self._writer.schedule()

    def _reach(self, end_op: int, values: Iterable[int]) -> None:
        if self._next < end_op:
            self.run_to(end_op)
        else:
            for value in values:
                self._writer.make(value)
