"""The rows of a report's tables: the largest storages, and a module tree cut to fit."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memprof.analysis.report.breakdown import Breakdown, Holding
from memprof.analysis.report.module_tree import ModuleTree
from memprof.analysis.report.sources import SourceLine, Sources
from memprof.trace.schema import NONE, Ints


@dataclass(frozen=True)
class LargeStorage:
    """One storage live at a moment.

    Attributes:
        allocated_bytes: Bytes after the allocator's rounding.
        requested_bytes: Requested bytes.
        category: Its category.
        name: Its parameter or buffer, "" for others.
        metadata: What the job noted of it in an imported snapshot, "" for nothing.
        shape: Shape of the first tensor on it, such as ``8x128x256``; "" where no tensor was seen.
        dtype: That tensor's dtype.
        module: Qualified name of the module that owns or allocated it, None outside any module.
        module_title: The same with the root's type instead of "".
        op: Name of the operator that allocated it, None when live before the step.
        source: The user's line of code that allocated it.
        created_op_id: The operator that allocated it, None when live before the step.
        freed_op_id: The last operator run before it is freed, None when it outlives the step.
        age_ops: Operators run since its allocation, None when live before the step.
        age_us: Duration of these without the recorder, NaN where unknown.
    """

    allocated_bytes: int
    requested_bytes: int
    category: str
    name: str
    metadata: str
    shape: str
    dtype: str
    module: str | None
    module_title: str | None
    op: str | None
    source: SourceLine | None
    created_op_id: int | None
    freed_op_id: int | None
    age_ops: int | None
    age_us: float


def find_largest(holding: Holding, sources: Sources, limit: int) -> tuple[LargeStorage, ...]:
    """Returns the largest storages of a moment, the older first on ties."""
    order = np.lexsort((holding.rows, -holding.bytes))[:limit]
    return tuple(_describe(holding, sources, place) for place in order.tolist())


def _describe(holding: Holding, sources: Sources, place: int) -> LargeStorage:
    row = int(holding.rows[place])
    step, storages, ops = holding.step, holding.step.storages, holding.step.ops
    created, freed = int(storages.created_op_id[row]), int(storages.freed_op_id[row])
    module_id = int(storages.module_id[row])
    module = None if module_id == NONE else str(step.modules.name[module_id])
    is_older = created == NONE
    return LargeStorage(
        allocated_bytes=int(storages.allocated_bytes[row]),
        requested_bytes=int(storages.requested_bytes[row]),
        category=str(storages.category[row]),
        name=str(storages.name[row]),
        metadata=str(storages.metadata[row]),
        shape=str(storages.shape[row]),
        dtype=str(storages.dtype[row]),
        module=module,
        module_title=module or (None if module is None else str(step.modules.type[module_id])),
        op=None if is_older else str(ops.name[created]),
        source=sources.of_stack(int(holding.stacks[place])),
        created_op_id=None if is_older else created,
        freed_op_id=None if freed == NONE else freed,
        age_ops=None if is_older else holding.op_id - created,
        age_us=float("nan") if is_older else float(ops.duration_us[created : holding.op_id].sum()),
    )


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


def every_row(breakdown: Breakdown[int], tree: ModuleTree) -> Iterator[TreeRow]:
    """Returns each module with bytes, those with the most of their own first, and a row for those outside any module.

    Args:
        breakdown: Bytes by node, without children; they sum to the rows' own bytes.
        tree: The tree of the nodes.
    """
    own, outside = bytes_by_node(breakdown, tree)
    total = tree.with_children(own)
    for node in np.lexsort((-total, -own)).tolist():
        if own[node] or total[node]:
            yield TreeRow(node, 0, int(total[node]), int(own[node]))
    if outside:
        yield TreeRow(None, 0, outside, outside)


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
