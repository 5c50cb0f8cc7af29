"""The cost of recomputing each module's forward in backward, and the memory it would free."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memprof.analysis.report.module_tree import ModuleTree
from memprof.analysis.report.saved import SavedStorages
from memprof.json_values import LEFT_OUT
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step


@dataclass(frozen=True)
class RecomputeCost:
    """Cost and benefit of activation checkpointing for one module, or for several alike.

    Attributes:
        node: The module's node.
        freed_bytes: Allocated bytes from its forward that it alone saves for backward, children included: what would no
            longer be saved. With several micro-batches, those of the one that saves the most.
        time_us: Duration of its forward operators, children included, over the whole step; NaN where none was timed.
        flops: Floating point operations of these.
    """

    node: int = field(metadata=LEFT_OUT)
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
