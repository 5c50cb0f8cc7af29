"""Where forward can be cut into segments: points that few bytes cross."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.planners.graph.graph import Graph
from memprof.trace.schema import Bools, Ints


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
