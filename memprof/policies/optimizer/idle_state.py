"""Optimizer state that swap moves, of parameters that a step does not update, such as experts without tokens."""

from __future__ import annotations

import numpy as np

from memprof.policies.optimizer.single_updates import SWAPS
from memprof.policies.rewrite.draft import Draft
from memprof.trace.schema import NONE
from memprof.trace.step import Step


def keep_out(step: Step) -> Step:
    """Returns a step in which swapped state stays out if no update uses it.

    An update of all parameters brings all their state in; updates within backward bring in that of one parameter.

    Args:
        step: A step under swap, or another, which is returned as it is.
    """
    ops, storages, uses = step.ops, step.storages, step.uses
    is_copy = np.append(np.isin(ops.name, SWAPS) & (ops.phase == "optimizer"), False)
    is_state = (storages.category == "optimizer_state") & (storages.created_op_id != NONE)
    is_idle = is_state & is_copy[storages.created_op_id]
    is_idle[uses.storage_id[~is_copy[uses.op_id]]] = False
    if not is_idle.any():
        return step
    draft = Draft(step)
    draft.remove_storages(np.flatnonzero(is_idle))
    draft.remove_ops(np.unique(uses.op_id[is_idle[uses.storage_id]]))
    return draft.build()
