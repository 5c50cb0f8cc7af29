"""Replays one stage of a chain alone: recompute order, time and live bytes."""

from __future__ import annotations

from memprof.planners.graph.graph import Graph
from memprof.planners.graph.stages import Line, Stage
from memprof.trace.schema import NONE

#: Operators in run order, each with the bytes live during it besides the stage's values; NONE stands for others, which
#: neither make nor read any of these.
Items = list[tuple[int, int]]


def backward_items(graph: Graph, line: Line, stage: Stage, reads: list[list[int]]) -> Items:
    """Lists a stage's backward: the operators that read its values, and the peak of other live bytes between."""
    start, tracked = line.bytes_before(stage.backward_op), set(stage.values)
    items: Items = []
    busy = line.base_bytes + graph.workspace_bytes
    at = stage.backward_op
    for op_id in range(stage.backward_op, stage.backward_end_op):
        if tracked.isdisjoint(reads[op_id]):
            continue
        if op_id > at:
            items.append((NONE, int(busy[at:op_id].max()) - start))
        items.append((op_id, int(busy[op_id]) - start))
        at = op_id + 1
    if stage.backward_end_op > at:
        items.append((NONE, int(busy[at : stage.backward_end_op].max()) - start))
    return items


class Rehearsal:
    """Replays one stage alone.

    Attributes:
        first: Its first forward.
        late: Its values that its backward reads, in ascending order.
    """

    def __init__(
        self,
        graph: Graph,
        line: Line,
        stage: Stage,
        times: list[float],
        reads: list[list[int]],
        made: list[list[int]],
    ) -> None:
        """Extracts the stage's operators and values from the step.

        Args:
            graph: The step.
            line: The chain.
            stage: One of its stages.
            times: Time of each operator of its forward, in microseconds.
            reads: Values that each operator of the step reads.
            made: Values that each operator of the step makes.
        """
        self._line, self._stage, self._times = line, stage, times
        self._size, self._taken = graph.value_bytes.tolist(), graph.taken_from.tolist()
        self._maker, self._workspace = graph.value_op.tolist(), graph.workspace_bytes.tolist()
        self._reads, self._made = reads, made
        self._tracked = frozenset(stage.values)
        self._backward = backward_items(graph, line, stage, reads)
        start = line.bytes_before(stage.first_op)
        self.first: Items = [
            (op_id, int(line.base_bytes[op_id] + graph.workspace_bytes[op_id]) - start)
            for op_id in range(stage.first_op, stage.end_op)
        ]
        self.late = sorted({v for op_id, _ in self._backward if op_id != NONE for v in reads[op_id]} & self._tracked)

    def size_of(self, values: set[int]) -> int:
        """Returns the bytes of values."""
        return sum(self._size[value] for value in values)

    def backward(self, held: set[int]) -> tuple[Items, float]:
        """Lists the stage's backward with its recompute; also returns the recompute time."""
        alive = set(held)
        items: Items = []
        spent = 0.0
        for op_id, extra in self._backward:
            if op_id != NONE:
                missing = {value for value in self._reads[op_id] if value in self._tracked and value not in alive}
                above = self._line.bytes_before(op_id) - self._line.bytes_before(self._stage.backward_op)
                made = self.making(missing, alive) if missing else []
                spent += self.time_of(made)
                items += [(other, busy + above) for other, busy in made]
            items.append((op_id, extra))
        return items, spent

    def making(self, wanted: set[int], alive: set[int]) -> Items:
        """Lists the operators that make values, with their workspace; adds the values they leave to ``alive``."""
        items: Items = []
        for value in sorted(wanted):
            stack = [] if value in alive else [self._maker[value]]
            while stack:
                op_id = stack[-1]
                missing = [v for v in self._reads[op_id] if v in self._tracked and v not in alive]
                if missing:
                    stack.extend(self._maker[v] for v in reversed(missing))
                    continue
                stack.pop()
                if all(v in alive for v in self._made[op_id]):
                    continue
                items.append((op_id, self._workspace[op_id]))
                alive.update(self._made[op_id])
                alive.difference_update(self._taken[v] for v in self._made[op_id])
        return items

    def time_of(self, items: Items) -> float:
        """Returns the time of operators of its forward, in microseconds."""
        return sum(self._times[op_id - self._stage.first_op] for op_id, _ in items)

    def peak(self, items: Items, start: set[int], end: set[int], *, with_inputs: bool = False) -> int:
        """Replays operators: values live from creation to their last read, or to the end.

        Args:
            items: The operators.
            start: Values live at the start.
            end: Values live at the end.
            with_inputs: Count the stage's inputs too.

        Returns:
            The peak in bytes.
        """
        tracked = self._tracked.union(self._stage.inputs) if with_inputs else self._tracked
        count = len(items)
        change = [0] * (count + 1)
        size, taken = self._size, self._taken
        open_since = {value: (0, 0) for value in start if value in tracked}

        def close(value: int, last: int) -> None:
            born, _ = open_since.pop(value)
            if last >= born:
                change[born] += size[value]
                change[min(last + 1, count)] -= size[value]

        for at, (op_id, _) in enumerate(items):
            if op_id == NONE:
                continue
            for value in self._reads[op_id]:
                if value in open_since:
                    open_since[value] = (open_since[value][0], at)
            for value in self._made[op_id]:
                if value not in tracked:
                    continue
                if value in open_since:
                    close(value, open_since[value][1])
                if taken[value] in open_since:
                    close(taken[value], at - 1)
                open_since[value] = (at, at)
        for value in list(open_since):
            close(value, count - 1 if value in end else open_since[value][1])
        alive, peak = 0, 0
        for at, (_, extra) in enumerate(items):
            alive += change[at]
            peak = max(peak, alive + extra)
        return peak
