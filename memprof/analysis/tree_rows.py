"""Chooses the rows of a module tree that fit a table, so that a row is the sum of itself and the rows below it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from memprof.analysis.breakdown import Breakdown
from memprof.analysis.module_tree import ModuleTree
from memprof.trace.schema import NONE, Ints


@dataclass(frozen=True)
class TreeRow:
    """One row of a module tree.

    Attributes:
        node: The module's node; None for bytes outside any module and for a row that sums what was cut.
        depth: How far to indent.
        bytes: Bytes with children.
        own_bytes: Bytes without children.
        cut: How many siblings the row sums up; 0 for a row of its own.
    """

    node: int | None
    depth: int
    bytes: int
    own_bytes: int
    cut: int = 0


def bytes_by_node(breakdown: Breakdown[int], tree: ModuleTree) -> tuple[Ints, int]:
    """Returns the bytes of each node itself, shape ``(nodes,)``, and those outside any module."""
    own = np.zeros(len(tree), dtype=np.int64)
    outside = 0
    for part in breakdown.parts:
        if part.key is None:
            outside = part.bytes
        else:
            own[part.key] = part.bytes
    return own, outside


def choose_rows(breakdown: Breakdown[int], tree: ModuleTree, limit: int) -> tuple[TreeRow, ...]:
    """Chooses rows by opening the largest module again and again, as long as its children fit.

    The rows of depth 0 sum to the whole, and those right below an opened module, with its own bytes, to its bytes.
    Siblings that do not fit are summed in one row.

    Args:
        breakdown: Bytes by node, without children.
        tree: The tree of the nodes.
        limit: Rows at most; the outermost modules are shown whatever it is.
    """
    own, outside = bytes_by_node(breakdown, tree)
    total = tree.with_children(own)
    children: dict[int, list[int]] = {}
    for node in np.argsort(-total, kind="stable").tolist():
        if total[node] or own[node]:
            children.setdefault(int(tree.parent[node]), []).append(node)
    roots = children.get(NONE, [])
    opened: dict[int, int] = {NONE: len(roots)}  # node -> how many of its children are shown by themselves
    room = limit - len(roots) - bool(outside)
    queue = [(-int(total[node]), node) for node in roots]
    heapq.heapify(queue)
    while queue and room > 0:
        _, node = heapq.heappop(queue)
        below = children.get(node, [])
        # One row is left for the sum of the others; that alone would say nothing.
        shown = len(below) if len(below) <= room else room - 1
        if shown <= 0:
            continue
        opened[node] = shown
        room -= shown + (shown < len(below))
        for child in below[:shown]:
            heapq.heappush(queue, (-int(total[child]), child))
    rows = _write_rows(NONE, 0, opened, children, total, own)
    return (*rows, TreeRow(None, 0, outside, outside)) if outside else tuple(rows)


def _write_rows(
    above: int, depth: int, opened: dict[int, int], children: dict[int, list[int]], total: Ints, own: Ints
) -> list[TreeRow]:
    if above not in opened:
        return []
    rows = []
    for node in children[above][: opened[above]] if above in children else []:
        rows.append(TreeRow(node, depth, int(total[node]), int(own[node])))
        rows += _write_rows(node, depth + 1, opened, children, total, own)
    rest = children.get(above, [])[opened[above] :]
    if rest:
        rows.append(TreeRow(None, depth, int(total[rest].sum()), int(own[rest].sum()), cut=len(rest)))
    return rows
