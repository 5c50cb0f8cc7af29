"""Finds the calls of modules around each operator."""

from __future__ import annotations

import numpy as np

from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step


class Calls:
    """Calls of modules around each operator of a step, some of which are chosen.

    These are the calls of forward, and those that ``checkpoint(use_reentrant=True)`` repeats: in its first run autograd
    saves nothing, in its second what it saves in any forward. The second run of the other variant fills the places of
    tensors that the first has saved, and is not among them.

    Attributes:
        inner: The innermost call. Shape (ops,).
        region_of: The outermost call of a chosen module, NONE outside.
        top_start: First operator of the outermost call of all, 0 outside.
        wrapped_end: Last operator of the outermost call of a chosen module or of a root.
    """

    def __init__(self, step: Step, is_chosen: Bools) -> None:
        """Finds the calls.

        Args:
            step: The step.
            is_chosen: Chosen modules, shape ``(modules,)``.
        """
        calls, total = step.module_calls, len(step.ops)
        self.first, self.last, self.parent = calls.first_op_id, calls.last_op_id, calls.parent_call_id
        self.module, self.is_recompute = calls.module_id, calls.is_recompute
        self.inner = np.full(total, NONE, dtype=np.int64)
        self.region_of = np.full(total, NONE, dtype=np.int64)
        self.top_start = np.zeros(total, dtype=np.int64)
        self.wrapped_end = np.arange(total)
        is_region = is_chosen[calls.module_id]
        is_wrapped = is_region | (step.modules.parent_id[calls.module_id] == NONE)
        is_complete = (self.first != NONE) & (self.last != NONE)
        is_complete &= ~calls.is_recompute | _has_nodes(step, self.first, self.last)
        depth = np.zeros(len(calls), dtype=np.int64)
        parents = self.parent
        while (parents != NONE).any():
            depth += parents != NONE
            parents = np.where(parents != NONE, self.parent[parents], NONE)
        has_wrapped = np.zeros(total, dtype=np.bool_)
        for level in range(int(depth.max(initial=-1)) + 1):
            rows = np.flatnonzero((depth == level) & is_complete)
            length = self.last[rows] - self.first[rows] + 1
            owner = np.repeat(rows, length)
            ops = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length) + self.first[owner]
            self.inner[ops] = owner
            if level == 0:
                self.top_start[ops] = self.first[owner]
            is_new = is_region[owner] & (self.region_of[ops] == NONE)
            self.region_of[ops[is_new]] = owner[is_new]
            is_new = is_wrapped[owner] & ~has_wrapped[ops]
            self.wrapped_end[ops[is_new]] = self.last[owner[is_new]]
            has_wrapped[ops[is_new]] = True

    def surround(self, first: Ints, last: Ints, again: Ints) -> Bools:
        """Returns whether calls of chosen modules surround regions: those that are repeated with one lie inside of it.

        Args:
            first: First operator of each region in forward.
            last: Last operator of it.
            again: First operator of its recomputation.
        """
        region = self.region_of[first]
        is_around: Bools = (region != NONE) & (self.last[region] >= last)
        rows = np.flatnonzero(is_around)
        module = self.module[region[rows]]
        is_inside = np.zeros(len(rows), dtype=np.bool_)
        for call in np.flatnonzero(self.is_recompute & np.isin(self.module, module)).tolist():
            is_again = (self.first[call] <= again[rows]) & (again[rows] <= self.last[call])
            is_inside |= is_again & (module == self.module[call])
        is_around[rows[is_inside]] = False
        return is_around


def _has_nodes(step: Step, first: Ints, last: Ints) -> Bools:
    """Marks the ranges of operators, each of shape ``(ranges,)``, that hold a recomputed one with a backward node."""
    ops = step.ops
    made = ops.forward_op_id[(ops.forward_op_id != NONE) & ~ops.is_recompute]
    has_node = np.zeros(len(ops) + 1, dtype=np.int64)
    has_node[made[ops.is_recompute[made]] + 1] = 1
    count = np.cumsum(has_node)
    found: Bools = count[last + 1] > count[first]
    return found
