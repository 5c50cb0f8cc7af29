"""What running each module's forward again in backward would cost, beside the memory that it would free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.analysis.report.module_tree import ModuleTree
from memprof.analysis.report.saved import SavedStorages
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step


@dataclass(frozen=True)
class RecomputeCost:
    """Activation checkpointing of one module (or of several that are alike), weighed.

    Attributes:
        node: The module's node.
        freed_bytes: Allocated bytes made in its forward and kept for backward by itself alone, children included:
            what is no longer kept. Of a step with several micro-batches, those of the one that keeps the most.
        time_us: Duration of its forward operators, children included, over the whole step; NaN where none was timed.
        flops: Floating point operations of the same.
    """

    node: int
    freed_bytes: int
    time_us: float
    flops: int

    @property
    def bytes_per_us(self) -> float:
        """Bytes freed for each microsecond of recomputing; infinite where it costs nothing, NaN where unknown."""
        if np.isnan(self.time_us):
            return float("nan")
        return self.freed_bytes / self.time_us if self.time_us > 0 else float("inf")


def weigh_recompute(
    step: Step, saved: SavedStorages, modules: ModuleTree, tree: ModuleTree
) -> tuple[RecomputeCost, ...]:
    """Weighs activation checkpointing for every module that would free something, best first.

    Best is most bytes freed per microsecond. A storage that an operator outside the module keeps as well (the
    module's own output, mostly) would stay and is not counted, nor is what is made while recomputing already.
    Rows of a module and of one inside it count the same memory: they are alternatives, not parts. Roots are left
    out, as recomputing a whole model brings everything back at once, and so are modules that are never called.

    Args:
        step: The step.
        saved: What it keeps for backward.
        modules: The tree with a node for each module.
        tree: The tree whose nodes are weighed; several modules in one node are checkpointed each by itself.
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
    """Returns which nodes run a forward of their own; a ModuleList, say, does not."""
    calls = step.module_calls.module_id
    if not len(calls):  # a trace that does not say
        return np.ones(len(tree), dtype=np.bool_)
    return tree.sum_by_node(calls, np.ones(len(calls), dtype=np.int64)) > 0


def _freed_by_node(step: Step, saved: SavedStorages, modules: ModuleTree, tree: ModuleTree) -> Ints:
    """Returns the bytes that checkpointing each node frees, of its fullest micro-batch, shape ``(nodes,)``."""
    holders = _holders(step, saved, modules)
    makers = step.storages.created_op_id[saved.rows]
    is_freed = (holders != NONE) & (makers != NONE)
    # NONE indexes the last operator here; the mask above leaves those out.
    is_freed &= (step.ops.phase[makers] == "forward") & ~step.ops.is_recompute[makers]
    rounds = step.ops.micro_batch[makers[is_freed]]
    own = np.zeros((int(rounds.max(initial=0)) + 1, len(tree)), dtype=np.int64)
    np.add.at(own, (rounds, tree.nodes_of(holders[is_freed])), saved.bytes[is_freed])
    return np.asarray(tree.with_children(own).max(axis=0), dtype=np.int64)


def _holders(step: Step, saved: SavedStorages, modules: ModuleTree) -> Ints:
    """Returns the lowest module that makes each saved storage and holds all operators that keep it, or ``NONE``."""
    holders = np.append(step.ops.module_id, NONE)[step.storages.created_op_id[saved.rows]]
    position = np.full(len(step.storages), NONE, dtype=np.int64)
    position[saved.rows] = np.arange(len(saved))
    positions = position[step.saved.storage_id]
    savers = step.ops.module_id[step.saved.forward_op_id][positions != NONE]
    positions = positions[positions != NONE]
    while len(positions):  # one saver of every storage a round: few rounds, each over whole columns
        now, firsts = np.unique(positions, return_index=True)
        holders[now] = modules.common_ancestors(holders[now], savers[firsts])
        rest = np.ones(len(positions), dtype=np.bool_)
        rest[firsts] = False
        positions, savers = positions[rest], savers[rest]
    return holders
