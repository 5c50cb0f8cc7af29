"""Turns what a chain planner decides, stage by stage, into the order of operators that carries it out."""

from __future__ import annotations

from collections.abc import Iterable

from memprof.planners.graph.graph import Graph
from memprof.planners.graph.stages import Stage
from memprof.planners.graph.writing import Readers, Writer
from memprof.trace.schema import Ints


class Walk:
    """Writes a schedule down while it goes through stages, forward, forward again and backward.

    The first time through a stage, the step's own operators run. Later only what is asked for runs, so a decision
    that needs less than it pays for costs less than the planner believed.
    """

    def __init__(self, graph: Graph) -> None:
        """Starts before the first operator of a step."""
        self._readers = Readers(graph)
        self._writer = Writer(self._readers)
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
        self.drop(value for value in stage.values if self._readers.last_read[value] < stage.backward_end_op)

    def drop(self, values: Iterable[int], *, but: Iterable[int] = ()) -> None:
        """Lets go of values: whoever asks for them later has them made again."""
        kept = set(but)
        for value in values:
            if value not in kept:
                self._writer.is_alive[value] = False

    def run_to(self, end_op: int) -> None:
        """Runs the step's own operators up to one, and before each of them whatever it misses."""
        for op_id in range(self._next, end_op):
            self._writer.supply(op_id)
            self._writer.run(op_id)
        self._next = max(self._next, end_op)

    def runs(self) -> Ints:
        """Ends the walk with the rest of the step and returns the schedule."""
        self.run_to(self._readers.ops)
        return self._writer.schedule()

    def _reach(self, end_op: int, values: Iterable[int]) -> None:
        if self._next < end_op:
            self.run_to(end_op)
        else:
            for value in values:
                self._writer.make(value)
