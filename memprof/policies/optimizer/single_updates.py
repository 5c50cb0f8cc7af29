"""What updates of one parameter after another use: their operators, and the swapped state that stays out."""

from __future__ import annotations

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.optimizer.recognise import Updates
from memprof.policies.rewrite.draft import Draft
from memprof.policies.rewrite.insertion import SWAP_IN, SWAP_OUT
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step

#: Overhead of one optimizer call for one parameter, without its operators: hook, Python, groups. Adam and SGD inside
#: backward on GPT, ResNet, LSTM and shared weights took 31 to 126 us more per parameter (torch 2.13, one CPU core).
CALL_US = 75.0

#: Copies that swap inserted around the updates.
SWAPS = (SWAP_IN, SWAP_OUT)


def blocks_of(step: Step, updates: Updates) -> tuple[Ints, Ints]:
    """Returns the first and the last operator of each update, in the order of ``updates.updates``.

    Args:
        step: The step.
        updates: Its updates.

    Raises:
        PolicyError: The optimizer does not update one parameter after another: an operator of its step concerns several
            parameters, or it returns to a parameter after others, as for a norm of all of them.
    """
    is_own = ~np.isin(step.ops.name[updates.ops], SWAPS)
    ops, owner = updates.ops[is_own], updates.owner[is_own]
    if np.any(owner == NONE):
        raise PolicyError(_together(step, updates, "in one operator"))
    begins = np.append(True, owner[1:] != owner[:-1])
    owners = owner[begins]
    names, runs = np.unique(owners, return_counts=True)
    if np.any(runs > 1):
        raise PolicyError(_together(step, updates, f"and returns to {updates.updates[names[runs > 1][0]].name}"))
    first = np.full(len(updates.updates), NONE, dtype=np.int64)
    last = first.copy()
    first[owners] = ops[begins]
    last[owners] = ops[np.append(np.flatnonzero(begins)[1:], len(ops)) - 1]
    return first, last


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


def _together(step: Step, updates: Updates, how: str) -> str:
    kinds = ", ".join(dict.fromkeys(str(each.name) for each in step.optimizers)) or "The optimizer"
    return (
        f"{kinds} computes the updates of {len(updates.updates)} parameters together ({how}), so that it cannot update "
        "one parameter at a time: leave out in_backward and one_by_one."
    )
