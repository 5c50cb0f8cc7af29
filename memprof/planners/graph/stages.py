"""A step as a chain of stages, cut where all that later operators need crosses through a small set of values.

Published planners for chains (Gruslys 2016, rotor) assume stages with one input and one output. Real steps have them
wherever forward narrows to one value: between layers, between recurrent steps. A value that many stages read (the skip
of a U-Net) can be fixed as kept, so that the rest narrows again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.planners.graph.graph import Graph
from memprof.trace.schema import NONE, Bools, Ints


@dataclass(frozen=True, eq=False)
class Stage:
    """A stretch of forward and its stretch of backward.

    Attributes:
        first_op: Its first operator in forward.
        end_op: The operator after its last in forward.
        backward_op: Its first operator in backward.
        backward_end_op: The operator after its last in backward.
        inputs: Values that pass into it.
        outputs: Values that pass out of it.
        values: The values it makes, ``outputs`` included; fixed ones excluded.
    """

    first_op: int
    end_op: int
    backward_op: int
    backward_end_op: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    values: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Line:
    """One round of forward and backward as a chain of stages.

    Attributes:
        stages: In order of forward.
        base_bytes: Live bytes during each operator of the step outside the stages' values, shape ``(ops,)``.
        base_after_bytes: The same after each operator.
    """

    stages: tuple[Stage, ...]
    base_bytes: Ints
    base_after_bytes: Ints

    def bytes_before(self, op_id: int) -> int:
        """Returns the live bytes outside the stages' values right before an operator."""
        return int(self.base_after_bytes[op_id - 1]) if op_id else int(self.base_bytes[0])


def lines_of(graph: Graph, *, widest: int | None = None, most_stages: int = 100) -> list[Line]:
    """Cuts every round of forward and backward of a step into stages.

    Args:
        graph: The step.
        widest: Values read further away than this many value-making operators are kept and do not prevent a cut; None
            to keep none.
        most_stages: Adjacent stages of least cost are merged down to this many.
    """
    return [_line(graph, *bounds, widest, most_stages) for bounds in _rounds(graph)]


def wide_values(graph: Graph, widest: int | None) -> Bools:
    """Returns the values read further away than a number of value-making operators."""
    if widest is None:
        return np.zeros(graph.values, dtype=np.bool_)
    makes = np.zeros(graph.ops + 1, dtype=np.int64)
    makes[graph.value_op + 1] = 1
    before = np.cumsum(makes)
    far: Bools = before[graph.last_forward_read()] - before[graph.value_op] > widest
    return far


def _rounds(graph: Graph) -> list[tuple[int, int, int]]:
    """Returns first operator, end of forward and end of each round: forward lasts until backward reads its values."""
    reads_late = np.zeros(graph.ops, dtype=np.bool_)
    reads_late[graph.read_op] = True
    reads_late &= graph.is_backward
    makes = np.zeros(graph.ops, dtype=np.bool_)
    makes[graph.value_op] = True
    rounds: list[tuple[int, int, int]] = []
    start, last_make, is_late = 0, NONE, False
    for op_id in np.flatnonzero(reads_late | makes).tolist():
        if not makes[op_id]:
            is_late = is_late or last_make != NONE
            continue
        if is_late:
            rounds.append((start, last_make + 1, op_id))
            start, is_late = op_id, False
        last_make = op_id
    if last_make != NONE:
        rounds.append((start, last_make + 1, graph.ops))
    return rounds


def _line(graph: Graph, first: int, turn: int, end: int, widest: int | None, most_stages: int) -> Line:
    last_read = graph.last_forward_read()
    is_wide = wide_values(graph, widest)
    values = np.flatnonzero((graph.value_op >= first) & (graph.value_op < turn) & ~is_wide)
    starts = _cuts(graph, first, turn, values, last_read)
    starts = _joined(graph, [first, *starts], turn, most_stages)
    ends = [*starts[1:], turn]

    # Values of one operator are ordered by use, which equal layers share, not by recording order.
    reader = np.full(graph.values, graph.ops)
    np.minimum.at(reader, graph.read_value, graph.read_op)
    made = values[np.lexsort((reader[values], graph.value_bytes[values], graph.value_op[values]))]
    split = np.searchsorted(graph.value_op[made], starts)
    inside = [tuple(part.tolist()) for part in np.split(made, split[1:])]
    crossing: list[tuple[int, ...]] = [()]
    crossing += [tuple(values[(graph.value_op[values] < at) & (last_read[values] >= at)].tolist()) for at in starts[1:]]
    crossing.append(())
    backward = _backward_starts(graph, turn, end, inside, crossing)
    stages = tuple(
        Stage(
            first_op=starts[row],
            end_op=ends[row],
            backward_op=backward[row],
            backward_end_op=backward[row - 1] if row else end,
            inputs=crossing[row],
            outputs=crossing[row + 1],
            values=inside[row],
        )
        for row in range(len(starts))
    )
    base, after = beside_values(graph, is_wide)
    return Line(stages, base, after)


def _cuts(graph: Graph, first: int, turn: int, values: Ints, last_read: Ints) -> list[int]:
    """Returns the operators before which values of at most one operator are still to be read in forward."""
    count = turn - first + 1
    # What a later round reads as well, such as what Python kept from one micro-batch to the next, passes every cut.
    born, last = graph.value_op[values] - first, np.minimum(last_read[values], turn - 1) - first
    passes = last > born
    crossing, makers = np.zeros(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    for sums, weight in ((crossing, np.ones(len(values), dtype=np.int64)), (makers, born)):
        np.add.at(sums, born[passes] + 1, weight[passes])
        np.subtract.at(sums, last[passes] + 1, weight[passes])
    crossing, makers = np.cumsum(crossing), np.cumsum(makers)
    # One value, or several of one operator: then the sum of their makers is a multiple of each.
    is_cut = crossing == 1
    for at in np.flatnonzero(crossing > 1).tolist():
        if makers[at] % crossing[at] == 0:
            across = born[passes & (born < at) & (last >= at)]
            is_cut[at] = bool(np.all(across == across[0]))
    # A value changed in place later cannot be restarted from.
    heirs = np.flatnonzero(graph.taken_from != NONE)
    old = graph.taken_from[heirs]
    inside = (graph.value_op[old] >= first) & (graph.value_op[heirs] < turn)
    spoilt = np.zeros(count + 1, dtype=np.int64)
    np.add.at(spoilt, graph.value_op[old[inside]] - first + 1, 1)
    np.subtract.at(spoilt, graph.value_op[heirs[inside]] - first + 1, 1)
    is_cut &= np.cumsum(spoilt) == 0
    # Cuts that only operators without values separate are the same cut.
    makes = np.zeros(count + 1, dtype=np.bool_)
    makes[born] = True
    is_cut[1:] &= makes[:-1]
    starts = np.flatnonzero(is_cut[: count - 1])
    return [int(at) + first for at in starts if at > 0]


def _joined(graph: Graph, starts: list[int], turn: int, most: int) -> list[int]:
    """Merges adjacent stages of least cost until there are few enough."""
    total = np.append(0.0, np.cumsum(graph.cost_us))
    while len(starts) > most:
        edges = np.array([*starts, turn])
        cost = total[edges[2:]] - total[edges[:-2]]
        del starts[int(np.argmin(cost)) + 1]
    return starts


def _backward_starts(
    graph: Graph, turn: int, end: int, inside: list[tuple[int, ...]], crossing: list[tuple[int, ...]]
) -> list[int]:
    """Returns where the backward of each stage begins: at the first read of its inputs or of the values it keeps."""
    first_late = np.full(graph.values, end, dtype=np.int64)
    late = (graph.read_op >= turn) & (graph.read_op < end)
    np.minimum.at(first_late, graph.read_value[late], graph.read_op[late])
    found = []
    for row, made in enumerate(inside):
        own = [value for value in made if value not in crossing[row + 1]]
        found.append(int(min((first_late[value] for value in (*own, *crossing[row])), default=end)))
    found[-1] = turn
    # Later stages come first; a stage whose backward reads nothing begins with the one before it.
    starts, limit = found.copy(), end
    for row in range(len(found) - 1):
        limit = min(limit, found[row])
        starts[row] = limit
    for row in reversed(range(len(found) - 1)):
        starts[row] = max(starts[row], starts[row + 1])
    return starts


def beside_values(graph: Graph, is_kept: Bools | None = None) -> tuple[Ints, Ints]:
    """Returns the bytes no choice changes: the floor, fixed values, and values held after their last read.

    Args:
        graph: The step.
        is_kept: Values held as in the recording, shape ``(values,)``; None for none.

    Returns:
        Bytes during and after each operator, each of shape ``(ops,)``.
    """
    start = graph.value_op.copy()
    np.maximum.at(start, graph.read_value, graph.read_op)
    start += 1
    if is_kept is not None:
        start = np.where(is_kept, graph.value_op, start)
    freed = np.where(graph.value_freed_op == NONE, graph.ops - 1, graph.value_freed_op)
    counts = freed >= start
    born, gone = np.zeros(graph.ops + 1, dtype=np.int64), np.zeros(graph.ops + 1, dtype=np.int64)
    np.add.at(born, start[counts], graph.value_bytes[counts])
    np.add.at(gone, freed[counts], graph.value_bytes[counts])
    after = np.cumsum(born - gone)[:-1]
    return graph.floor_bytes + after + gone[:-1], graph.floor_after_bytes + after
