"""The schedule for a set of dropped values: missing values are recomputed on demand."""

from __future__ import annotations

import numpy as np

from memprof.planners.graph.graph import Graph
from memprof.planners.graph.writing import Readers, Writer
from memprof.trace.schema import Bools, Ints


def make_on_demand(graph: Graph, dropped: Bools) -> Ints:
    """Drops values after their last read in forward, and recomputes them when an operator reads them.

    A recomputed value stays live until its last reader; an intermediate of a recompute without readers left is dropped
    at the next operator of the step. This is Chen 2016's recomputation (Training Deep Nets with Sublinear Memory Cost,
    section 3) for any set of values: what lies between two kept values is a segment.

    Args:
        graph: The step.
        dropped: Which values are dropped, shape ``(values,)``; those that cannot be recomputed are kept anyway. A value
            only forward reads is held for the recompute of its readers, unless it is dropped too.

    Returns:
        The schedule: operators in run order.
    """
    return Demand(graph).schedule(dropped)


class Demand:
    """Builds schedules of one graph, sharing lookups."""

    def __init__(self, graph: Graph) -> None:
        """Prepares a graph."""
        self._readers = Readers(graph)
        self._can_repeat = graph.can_repeat.tolist()
        # Droppable values, by the operator after which they are dropped.
        last_forward = graph.last_forward_read()
        candidates = np.flatnonzero(graph.can_repeat[graph.value_op])
        self._drop_after: dict[int, list[int]] = {}
        for value in candidates.tolist():
            self._drop_after.setdefault(int(last_forward[value]), []).append(value)

    def schedule(self, dropped: Bools) -> Ints:
        """Returns the schedule of one set of dropped values; see make_on_demand."""
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
