"""Selects rows of a module tree that fit a table, such that a row's bytes include the rows below it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from memprof.analysis.report.breakdown import Breakdown
from memprof.analysis.report.module_tree import ModuleTree
from memprof.trace.schema import NONE, Ints


@dataclass(frozen=True)
class TreeRow:
    """One row of a module tree.

    Attributes:
        node: The module's node; None for bytes outside any module and for a row of omitted siblings.
        depth: Indentation level.
        bytes: Bytes including children.
        own_bytes: Bytes excluding children.
        cut: Number of omitted siblings the row sums; 0 for a regular row.
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
    """Selects the modules with the most bytes; omitted ones are summed in one row below their parent.

    The rows of depth 0 sum to the whole. The rows directly below a module, plus its own bytes, sum to its bytes (unless
    none of its children is shown).

    Args:
        breakdown: Bytes by node, without children.
        tree: The tree of the nodes.
        limit: Maximum number of rows; the largest root is always shown.
    """
    own, outside = bytes_by_node(breakdown, tree)
    total = tree.with_children(own)
    children: dict[int, list[int]] = {}
    for node in np.argsort(-total, kind="stable").tolist():
        if total[node] or own[node]:
            children.setdefault(int(tree.parent[node]), []).append(node)
    shown = _most_bytes(children, total, limit - bool(outside))
    rows = _write_rows(NONE, 0, shown, children, total, own)
    return (*rows, TreeRow(None, 0, outside, outside)) if outside else tuple(rows)


def _most_bytes(children: dict[int, list[int]], total: Ints, limit: int) -> dict[int, int]:
    """Returns the number of children shown per node, the largest first, such that all rows are within the limit."""
    shown: dict[int, int] = {}
    rows = 0
    queue = [(0, NONE)] if NONE in children else []  # parents by their largest child not yet shown
    while queue:
        _, parent = heapq.heappop(queue)
        first, hidden = parent not in shown, len(children[parent]) - shown.get(parent, 0)
        # The first child adds a row that sums its siblings; the last child replaces that row.
        more = 1 + (first and hidden > 1) - (not first and hidden == 1)
        if rows + more > limit and rows:
            continue
        rows += more
        node = children[parent][shown.get(parent, 0)]
        shown[parent] = shown.get(parent, 0) + 1
        if hidden > 1:
            heapq.heappush(queue, (-int(total[children[parent][shown[parent]]]), parent))
        if node in children:
            heapq.heappush(queue, (-int(total[children[node][0]]), node))
    return shown


def _write_rows(
    above: int, depth: int, shown: dict[int, int], children: dict[int, list[int]], total: Ints, own: Ints
) -> list[TreeRow]:
    if above not in shown:
        return []
    rows = []
    for node in children[above][: shown[above]]:
        rows.append(TreeRow(node, depth, int(total[node]), int(own[node])))
        rows += _write_rows(node, depth + 1, shown, children, total, own)
    rest = children[above][shown[above] :]
    if rest:
        rows.append(TreeRow(None, depth, int(total[rest].sum()), int(own[rest].sum()), cut=len(rest)))
    return rows
