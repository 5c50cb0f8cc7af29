"""Where forward can be cut into segments, and schedules of nested ones, each recomputed as a whole.

The values that cross a cut are kept. Backward recomputes a segment from the last cut before it, and keeps what crosses
the cuts within the segment, level by level, and all of the innermost segment.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memprof.planners.graph.graph import Graph
from memprof.planners.graph.writing import Readers, Writer
from memprof.trace.schema import Bools, Ints


@dataclass(frozen=True)
class Segment:
    """A segment that is not cut further.

    Attributes:
        start_op: Its first operator.
        cuts: The operators after which forward is cut, on all levels, at or before this segment: values that cross them
            are kept while backward is in it. In order.
        is_last: Whether its round of forward ends with it, so that it needs no recompute.
    """

    start_op: int
    cuts: tuple[int, ...]
    is_last: bool


def cut_evenly(cuts: Cuts, parts: int, levels: int) -> list[Segment]:
    """Cuts a round of forward into segments that save equally much for backward, recursively on several levels.

    Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, section 4.3: g(n) = k + g(n / (k + 1)),
    with k = ``parts - 1`` values kept on each level.

    Args:
        cuts: Where it can be cut.
        parts: Number of segments into which each is cut, at least 2.
        levels: Number of levels; segments without a possible cut are left as they are.
    """
    total = np.concatenate([[0], np.cumsum(cuts.made_bytes)])
    after, intervals = cuts.after_op.tolist(), len(cuts.made_bytes)
    segments = []
    stack: list[tuple[int, int, int, tuple[int, ...]]] = [(0, intervals, levels, ())]
    while stack:
        low, high, left, path = stack.pop()
        if left == 0 or high - low == 1:
            start = after[low - 1] + 1 if low else cuts.start_op
            segments.append(Segment(start, path, high == intervals))
            continue
        edges = _even_edges(total, low, high, parts)
        for place in range(len(edges) - 1):
            behind = tuple(after[edge - 1] for edge in edges[1 : place + 1])
            stack.append((edges[place], edges[place + 1], left - 1, path + behind))
    return sorted(segments, key=lambda segment: segment.start_op)


def _even_edges(total: Ints, low: int, high: int, parts: int) -> list[int]:
    parts = min(parts, high - low)
    edges = [low]
    for part in range(1, parts):
        target = total[low] + (total[high] - total[low]) * part / parts
        place = int(np.searchsorted(total, target))
        if place > 0 and target - total[place - 1] < total[place] - target:
            place -= 1
        edges.append(min(max(place, edges[-1] + 1), high - (parts - part)))
    return [*edges, high]


class SegmentSchedules:
    """Builds schedules of one graph from segments, sharing lookups."""

    def __init__(self, graph: Graph) -> None:
        self._readers = Readers(graph)
        self._maker, self._last_read = self._readers.maker, self._readers.last_read
        self._can_repeat = graph.can_repeat.tolist()
        self._last_forward = graph.last_forward_read().tolist()
        self._ends_after: dict[int, list[int]] = {}
        for value, op_id in enumerate(self._last_forward):
            self._ends_after.setdefault(op_id, []).append(value)

    def schedule(self, segments: Sequence[Segment], most_runs: int) -> Ints | None:
        """Returns the schedule of some segments.

        Args:
            segments: Those of all rounds of forward, in order.
            most_runs: Number of runs at which to abort: where cuts do not separate a graph, the same operators are
                recomputed over and over.
        """
        starts = [segment.start_op for segment in segments]
        writer = Writer(self._readers)
        is_alive = writer.is_alive
        for op_id in range(self._readers.ops):
            if self._can_repeat[op_id]:
                writer.run(op_id)
                for value in self._ends_after.get(op_id, ()):
                    is_alive[value] = is_alive[value] and self._stays_in_forward(value, segments, starts)
                continue
            made = writer.supply(op_id, most_runs)
            if len(writer.runs) > most_runs:
                return None
            if made:
                reached = max(self._maker[value] for value in made)
                segment = segments[max(bisect_right(starts, reached) - 1, 0)]
                for value in made:
                    is_alive[value] = is_alive[value] and (
                        self._passes(value, segment.cuts)
                        or (self._maker[value] >= segment.start_op and self._last_read[value] > op_id)
                    )
            writer.run(op_id)
        return writer.schedule()

    def _stays_in_forward(self, value: int, segments: Sequence[Segment], starts: Sequence[int]) -> bool:
        place = max(bisect_right(starts, self._maker[value]) - 1, 0)
        while not segments[place].is_last:
            place += 1
        last = segments[place]
        return self._maker[value] >= last.start_op or self._passes(value, last.cuts)

    def _passes(self, value: int, cuts: tuple[int, ...]) -> bool:
        place = bisect_left(cuts, self._maker[value])
        return place < len(cuts) and cuts[place] < self._last_forward[value]


@dataclass(frozen=True, eq=False)
class Cuts:
    """Places at which one round of forward can be cut.

    Attributes:
        start_op: First operator of the round.
        after_op: The operators after which it can be cut, in order, shape ``(cuts,)``.
        made_bytes: Bytes that forward saves for backward in each interval between them, before the first and after the
            last, shape ``(cuts + 1,)``.
        passed_bytes: Bytes that cross each cut, shape ``(cuts,)``.
    """

    start_op: int
    after_op: Ints
    made_bytes: Ints
    passed_bytes: Ints


def cut_points(graph: Graph) -> list[Cuts]:
    """Returns the cuts that exactly one value crosses.

    Returns:
        One entry for each round of forward; each round is followed by its own backward.
    """
    return _cuts(graph, _passing(graph)[0] == 1)


def narrow_cuts(graph: Graph) -> list[Cuts]:
    """Returns the cuts that fewer bytes cross than their neighbours: candidates where there are few cut points.

    Returns:
        One entry for each round of forward.
    """
    count, size, _ = _passing(graph)
    # Where nothing crosses, as after the last operator of a round, there is nothing to cut.
    places = np.flatnonzero(graph.can_repeat & (count > 0))
    is_narrow = np.zeros(graph.ops, dtype=np.bool_)
    # Adjacent places of equal width are one place.
    level = size[places]
    starts = np.flatnonzero(np.append(True, level[1:] != level[:-1])[: len(level)])
    width = level[starts]
    before, after = np.append(np.inf, width[:-1])[: len(width)], np.append(width[1:], np.inf)[: len(width)]
    is_low = (width <= before) & (width <= after)
    is_narrow[places] = np.repeat(is_low, np.diff(np.append(starts, len(level))))
    return _cuts(graph, is_narrow)


def _passing(graph: Graph) -> tuple[Ints, Ints, Ints]:
    """Returns, per operator, how many values cross the point after it, their bytes, and an id of the set."""
    last = graph.last_forward_read()
    columns = (np.ones(graph.values, dtype=np.int64), graph.value_bytes, np.arange(graph.values) + 1)
    count, size, which = (np.zeros(graph.ops, dtype=np.int64) for _ in columns)
    for passing, column in zip((count, size, which), columns, strict=True):
        np.add.at(passing, graph.value_op, column)
        np.subtract.at(passing, last, column)
        np.cumsum(passing, out=passing)
    return count, size, which


def _cuts(graph: Graph, is_place: Bools) -> list[Cuts]:
    """Builds cuts from places; among those that the same values cross, the first."""
    _, size, which = _passing(graph)
    made = np.zeros(graph.ops + 1, dtype=np.int64)
    saved = graph.is_saved()
    np.add.at(made, graph.value_op[saved] + 1, graph.value_bytes[saved])
    made = np.cumsum(made)
    rounds = np.cumsum(graph.is_backward)
    cuts = []
    for number in np.unique(rounds[graph.can_repeat]).tolist():
        ops = np.flatnonzero(graph.can_repeat & (rounds == number))
        places = ops[:-1][is_place[ops[:-1]]]
        is_first = np.append(True, which[places[1:]] != which[places[:-1]])[: len(places)]
        places = places[is_first]
        edges = made[np.concatenate([ops[:1], places + 1, ops[-1:] + 1])]
        cuts.append(Cuts(int(ops[0]), places, np.diff(edges), size[places]))
    return cuts
