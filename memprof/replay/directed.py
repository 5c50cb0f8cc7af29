"""Searches in directed graphs given as pairs of node numbers, with scipy, which is imported at the first search."""

from __future__ import annotations

from typing import Any

import numpy as np

from memprof.trace.schema import Bools, Ints


def reached(start: int, tails: Ints, heads: Ints, nodes: int) -> Bools:
    """Returns which nodes can be reached, the start included, shape ``(nodes,)``.

    Args:
        start: The node to start at.
        tails: Where each edge starts.
        heads: Where it ends.
        nodes: Number of nodes.
    """
    from scipy.sparse.csgraph import breadth_first_order  # slow to import

    found = np.zeros(nodes, dtype=np.bool_)
    found[breadth_first_order(_matrix(tails, heads, nodes), start, return_predecessors=False)] = True
    return found


def cycle_of(tails: Ints, heads: Ints, nodes: int) -> Ints:
    """Returns a number for each node, equal for nodes that can be reached from each other, shape ``(nodes,)``.

    Args:
        tails: Where each edge starts.
        heads: Where it ends.
        nodes: Number of nodes.
    """
    from scipy.sparse.csgraph import connected_components  # slow to import

    _, label = connected_components(_matrix(tails, heads, nodes), directed=True, connection="strong")
    return label.astype(np.int64)


def _matrix(tails: Ints, heads: Ints, nodes: int) -> Any:
    from scipy.sparse import csr_array

    return csr_array((np.ones(len(tails), dtype=np.int8), (tails, heads)), shape=(nodes, nodes))
