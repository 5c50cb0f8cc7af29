"""What forward saves for backward, and which module saves it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.analysis.report.breakdown import Breakdown, split_bytes
from memprof.analysis.report.module_tree import ModuleTree
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step, sum_at

#: Also saved for backward, but live anyway: not part of what training adds.
PERMANENT = ("parameter", "buffer")


@dataclass(frozen=True, eq=False)
class SavedStorages:
    """Each storage saved for backward, once.

    Attributes:
        rows: Rows of the storages, shape ``(saved,)``.
        bytes: Their allocated bytes.
        saver_op_id: The first forward operator that saves each.
        module_id: That operator's module, ``NONE`` outside.
        last_op_id: The last operator during which it is kept: the last backward operator that reads it.
    """

    rows: Ints
    bytes: Ints
    saver_op_id: Ints
    module_id: Ints
    last_op_id: Ints

    def __len__(self) -> int:
        """Returns the number of storages."""
        return len(self.rows)

    def kept_at(self, op_id: int) -> Ints:
        """Returns the positions of what is kept while an operator runs."""
        return np.flatnonzero((self.saver_op_id <= op_id) & (self.last_op_id >= op_id))


@dataclass(frozen=True)
class SavedSummary:
    """What is saved for backward at one moment.

    Attributes:
        op_id: The moment; by default the fullest of the step.
        storages: Number of saved storages.
        by_module: Their bytes by the node whose own operators save them, each storage once.
    """

    op_id: int
    storages: int
    by_module: Breakdown[int]


def find_saved(step: Step) -> SavedStorages:
    """Lists what a step saves for backward, each storage once, under the first operator that saves it.

    Parameters and buffers are omitted: they are live anyway.

    Args:
        step: The step.
    """
    saved, storages = step.saved, step.storages
    saved = saved.take(~np.isin(storages.category[saved.storage_id].astype(str), PERMANENT))
    order = np.lexsort((saved.forward_op_id, saved.storage_id))
    saved = saved.take(order)
    rows, firsts = np.unique(saved.storage_id, return_index=True)
    last_op = max(len(step.ops) - 1, 0)
    released = np.where(saved.released_op_id == NONE, last_op, saved.released_op_id)
    last = np.maximum.reduceat(released, firsts) if len(rows) else np.empty(0, dtype=np.int64)
    freed = np.where(storages.freed_op_id[rows] == NONE, last_op, storages.freed_op_id[rows])
    return SavedStorages(
        rows=rows,
        bytes=storages.allocated_bytes[rows],
        saver_op_id=saved.forward_op_id[firsts],
        module_id=saved.module_id[firsts],
        last_op_id=np.minimum(last, freed),
    )


def summarise_saved(step: Step, saved: SavedStorages, tree: ModuleTree, op_id: int | None = None) -> SavedSummary:
    """Sums what is saved for backward by module.

    Args:
        step: The step.
        saved: What it saves.
        tree: The module tree, folded or not.
        op_id: The moment; None for the first with the most saved bytes.
    """
    if op_id is None:
        op_id = _fullest_op(step, saved)
    kept = saved.kept_at(op_id)
    nodes = [None if node == NONE else node for node in tree.nodes_of(saved.module_id[kept]).tolist()]
    return SavedSummary(op_id, len(kept), split_bytes(nodes, saved.bytes[kept].tolist()))


def _fullest_op(step: Step, saved: SavedStorages) -> int:
    kept_from = np.cumsum(sum_at(saved.saver_op_id, saved.bytes, len(step.ops)))
    left = sum_at(saved.last_op_id, saved.bytes, len(step.ops))
    return int(np.argmax(kept_from - np.cumsum(left) + left))
