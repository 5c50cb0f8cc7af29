"""Turns a chain planner's decisions, stage by stage, into an order of operators."""

from __future__ import annotations

from collections.abc import Iterable

from memprof.planners.graph.graph import Graph
from memprof.planners.graph.stages import Stage
from memprof.planners.graph.writing import Readers, Writer
from memprof.trace.schema import Ints


class Walk:
    """Builds a schedule by going through stages: forward, forward again and backward.

    The first pass through a stage runs the step's own operators. Later passes run only what is needed, so a decision
    can cost less than the planner assumed.
    """

    def __init__(self, graph: Graph) -> None:
        """Starts before the first operator of a step."""
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
