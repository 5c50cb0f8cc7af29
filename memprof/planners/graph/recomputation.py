"""The cost of recomputing dropped values: which operators run again, given what else is dropped."""

from __future__ import annotations

import numpy as np

from memprof.planners.graph.graph import Graph
from memprof.policies.evict.victims import Classes
from memprof.trace.schema import NONE, Bools, Ints


def gone_after_forward(graph: Graph) -> Bools:
    """Returns which values were freed before backward began; backward operators that need one recompute it.

    Returns:
        Shape ``(values,)``; dropped in every schedule with recompute, which would otherwise hold them.
    """
    backward = np.cumsum(graph.is_backward)
    freed = graph.value_freed_op
    is_early = (freed != NONE) & (backward[freed] == backward[graph.value_op])
    # A value whose memory another reuses in forward is gone as well.
    gone: Bools = is_early & ~graph.is_saved()
    return gone


class Recomputation:
    """The operators that run again for a growing set of dropped values, each of them once.

    The added cost of a value only shrinks as values are dropped: operators that run again anyway cost nothing more.

    Attributes:
        dropped: Which values are dropped, shape ``(values,)``.
        cost_us: Time of the operators that run again.
    """

    def __init__(self, graph: Graph) -> None:
        """Starts with the values that forward itself drops, for which nothing runs again."""
        self._reads = graph.reads_by_op()
        self._readers: list[list[int]] = [[] for _ in range(graph.values)]
        for op_id, value in zip(graph.read_op.tolist(), graph.read_value.tolist(), strict=True):
            self._readers[value].append(op_id)
        self._size = graph.value_bytes.tolist()
        self._maker = graph.value_op.tolist()
        self._cost = graph.cost_us.tolist()
        self.dropped = gone_after_forward(graph)
        self._is_gone = self.dropped.tolist()
        # For which values each operator was counted: their cost changes when it joins those that run again.
        self._counted_for: dict[int, set[int]] = {}
        # The bytes recomputed together, and the class that each operator which runs again is a member of.
        self._together = Classes()
        self._member: dict[int, int] = {}
        self.cost_us = 0.0

    def ops_for(self, value: int) -> list[int]:
        """Lists the operators that would additionally run again if a value were dropped."""
        ops, stack, seen = [], [self._maker[value]], {self._maker[value]}
        while stack:
            op_id = stack.pop()
            if op_id in self._member:
                continue
            self._counted_for.setdefault(op_id, set()).add(value)
            ops.append(op_id)
            for read in self._reads[op_id]:
                if self._is_gone[read] and self._maker[read] not in seen:
                    seen.add(self._maker[read])
                    stack.append(self._maker[read])
        return ops

    def added_us(self, value: int) -> float:
        """Returns the time that dropping a value adds to what is dropped already."""
        return float(sum(self._cost[op_id] for op_id in self.ops_for(value)))

    def together_bytes(self, value: int) -> int:
        """Returns the bytes recomputed at once if a value is dropped: a whole segment, if it joins two."""
        return int(self._size[value] + sum(map(self._together.total, self._neighbours(value))))

    def _neighbours(self, value: int) -> set[int]:
        beside = [self._maker[value], *self._readers[value]]
        reads = [read for op_id in self.ops_for(value) for read in self._reads[op_id]]
        beside += [self._maker[read] for read in reads if self._is_gone[read]]
        return {self._together.of(self._member[op_id]) for op_id in beside if op_id in self._member}

    def drop(self, value: int) -> set[int]:
        """Drops a value.

        Returns:
            The other values whose ``added_us`` changed, among those queried.
        """
        stale: set[int] = set()
        neighbours, member = self._neighbours(value), self._together.add(self._size[value])
        for other in neighbours:
            self._together.join(member, other)
        for op_id in self.ops_for(value):
            self._member[op_id] = member
            self.cost_us += self._cost[op_id]
            stale |= self._counted_for.pop(op_id, set())
        self._is_gone[value] = True
        self.dropped[value] = True
        stale.discard(value)
        return stale


def idle_between(graph: Graph) -> tuple[Ints, Ints]:
    """Returns the operators between which each value is idle: last read in forward and first read in backward.

    Returns:
        Last operator of forward and first of backward, each of shape ``(values,)``; the number of operators where
        backward never reads it.
    """
    first = np.full(graph.values, graph.ops, dtype=np.int64)
    is_late = ~graph.can_repeat[graph.read_op]
    np.minimum.at(first, graph.read_value[is_late], graph.read_op[is_late])
    return graph.last_forward_read(), first
