"""What forward saves for backward, which module saves it, and the cost of recomputing it instead."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.analysis.report.breakdown import Breakdown, split_bytes
from memprof.analysis.report.module_tree import ModuleTree
from memprof.trace.schema import NONE, Bools, Ints
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
        kept_from = np.cumsum(sum_at(saved.saver_op_id, saved.bytes, len(step.ops)))
        left = sum_at(saved.last_op_id, saved.bytes, len(step.ops))
        op_id = int(np.argmax(kept_from - np.cumsum(left) + left))
    kept = saved.kept_at(op_id)
    nodes = [None if node == NONE else node for node in tree.nodes_of(saved.module_id[kept]).tolist()]
    return SavedSummary(op_id, len(kept), split_bytes(nodes, saved.bytes[kept].tolist()))


@dataclass(frozen=True)
class RecomputeCost:
    """Cost and benefit of activation checkpointing for one module, or for several alike.

    Attributes:
        node: The module's node.
        module: Its name in the tree, "" for a root.
        type: Its class.
        count: How many modules the node stands for.
        freed_bytes: Allocated bytes from its forward that it alone saves for backward, children included: what would no
            longer be saved. With several micro-batches, those of the one that saves the most.
        time_us: Duration of its forward operators, children included, over the whole step; NaN where none was timed.
        flops: Floating point operations of these.
    """

    node: int
    module: str
    type: str
    count: int
    freed_bytes: int
    time_us: float
    flops: int

    @property
    def bytes_per_us(self) -> float:
        """Bytes freed per microsecond of recompute; infinite where recompute is free, NaN where unknown."""
        if np.isnan(self.time_us):
            return float("nan")
        return self.freed_bytes / self.time_us if self.time_us > 0 else float("inf")


def weigh_recompute(
    step: Step, saved: SavedStorages, modules: ModuleTree, tree: ModuleTree
) -> tuple[RecomputeCost, ...]:
    """Evaluates activation checkpointing for every module that would free memory, best first.

    Best is most bytes freed per microsecond. Not counted are storages that an operator outside the module saves as well
    (mostly the module's own output), and those already recomputed. Rows of a module and of one inside it count the same
    memory: they are alternatives, not parts. Roots are omitted, as recomputing a whole model brings everything back at
    once, and so are modules that are never called.

    Args:
        step: The step.
        saved: What it saves for backward.
        modules: The tree with one node per module.
        tree: The tree whose nodes are evaluated; several modules in one node are checkpointed separately.
    """
    freed = _freed_by_node(step, saved, modules, tree)
    ops = step.ops
    forward = ops.take((ops.phase == "forward") & ~ops.is_recompute & (ops.module_id != NONE))
    timed = forward.take(~np.isnan(forward.duration_us))
    time_us = np.bincount(tree.nodes_of(timed.module_id), weights=timed.duration_us, minlength=len(tree))
    time_us = tree.with_children(time_us.astype(np.float64))
    timed_ops = tree.with_children(tree.sum_by_node(timed.module_id, np.ones(len(timed), dtype=np.int64)))
    flops = tree.with_children(tree.sum_by_node(forward.module_id, forward.flops))
    costs = [
        RecomputeCost(
            node=node,
            module=tree.names[node],
            type=tree.types[node],
            count=int(tree.counts[node]),
            freed_bytes=int(freed[node]),
            time_us=float(time_us[node]) if timed_ops[node] else float("nan"),
            flops=int(flops[node]),
        )
        for node in np.flatnonzero((freed > 0) & (tree.parent != NONE) & _is_called(step, tree)).tolist()
    ]
    return tuple(sorted(costs, key=_rank))


def _rank(cost: RecomputeCost) -> tuple[bool, float, int, int]:
    is_unknown = bool(np.isnan(cost.bytes_per_us))
    return (is_unknown, 0.0 if is_unknown else -cost.bytes_per_us, -cost.freed_bytes, cost.node)


def _is_called(step: Step, tree: ModuleTree) -> Bools:
    """Returns which nodes run a forward of their own; a ModuleList, for example, does not."""
    calls = step.module_calls.module_id
    if not len(calls):  # a trace without calls
        return np.ones(len(tree), dtype=np.bool_)
    return tree.sum_by_node(calls, np.ones(len(calls), dtype=np.int64)) > 0


def _freed_by_node(step: Step, saved: SavedStorages, modules: ModuleTree, tree: ModuleTree) -> Ints:
    """Returns the bytes freed by checkpointing each node, for its fullest micro-batch, shape ``(nodes,)``."""
    holders = _holders(step, saved, modules)
    makers = step.storages.created_op_id[saved.rows]
    is_freed = (holders != NONE) & (makers != NONE)
    # NONE indexes the last operator here; the mask above excludes those.
    is_freed &= (step.ops.phase[makers] == "forward") & ~step.ops.is_recompute[makers]
    rounds = step.ops.micro_batch[makers[is_freed]]
    own = np.zeros((int(rounds.max(initial=0)) + 1, len(tree)), dtype=np.int64)
    np.add.at(own, (rounds, tree.nodes_of(holders[is_freed])), saved.bytes[is_freed])
    return np.asarray(tree.with_children(own).max(axis=0), dtype=np.int64)


def _holders(step: Step, saved: SavedStorages, modules: ModuleTree) -> Ints:
    """Returns the lowest module that allocates each saved storage and contains all its savers, or ``NONE``."""
    holders = np.append(step.ops.module_id, NONE)[step.storages.created_op_id[saved.rows]]
    position = np.full(len(step.storages), NONE, dtype=np.int64)
    position[saved.rows] = np.arange(len(saved))
    positions = position[step.saved.storage_id]
    savers = step.ops.module_id[step.saved.forward_op_id][positions != NONE]
    positions = positions[positions != NONE]
    while len(positions):  # one saver of every storage per round: few rounds, each vectorized
        now, firsts = np.unique(positions, return_index=True)
        holders[now] = modules.common_ancestors(holders[now], savers[firsts])
        rest = np.ones(len(positions), dtype=np.bool_)
        rest[firsts] = False
        positions, savers = positions[rest], savers[rest]
    return holders
