"""Updates in a recorded step: the operators of each parameter, the gradients they free, state in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.optimizer.policy import EARLY, SECOND_BACKWARD, USED
from memprof.policies.rewrite.draft import Draft
from memprof.policies.rewrite.insertion import SWAP_IN, SWAP_OUT
from memprof.trace.operator_facts import UPDATE_WORDS, ZEROING, are_among, have_word
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step

#: Overhead of one optimizer call for one parameter, without its operators: hook, Python, groups. Adam and SGD inside
#: backward on GPT, ResNet, LSTM and shared weights took 31 to 126 us more per parameter (torch 2.13, one CPU core).
CALL_US = 75.0
#: Copies that swap inserts around updates; they are no part of them.
SWAPS = (SWAP_IN, SWAP_OUT)
#: Parameters with fewer elements, or whose element count is no multiple of a block, keep 32 bits; each block has a
#: scale of 4 bytes, each state a table of 256 numbers (torchao and bitsandbytes alike).
_FROM, _BLOCK, _TABLE_BYTES = 4096, 256, 1024


@dataclass(frozen=True, eq=False)
class SingleUpdates:
    """The updates of a step, each of one parameter.

    Attributes:
        ops: Operators of the optimizers, in order.
        first: First operator of each update, shape ``(updates,)``.
        last: Last operator of each.
        of_storage: Update that uses each storage, NONE for others; shape ``(storages,)``.
    """

    ops: Ints
    first: Ints
    last: Ints
    of_storage: Ints


def is_updating(step: Step) -> Bools:
    """Returns which operators are of optimizers' updates, shape ``(ops,)``."""
    found: Bools = (step.ops.phase == "optimizer") & ~are_among(step.ops.name, ZEROING)
    return found


def update_form(step: Step) -> str:
    """Returns the form of a step's updates: loop, foreach or fused."""
    names = step.ops.name[is_updating(step)]
    return next((form for form, word in UPDATE_WORDS.items() if have_word(names, (word,)).any()), "loop")


def single_updates(step: Step) -> SingleUpdates:
    """Reads the updates of a step.

    Raises:
        PolicyError: It has none, or does not update one parameter after another: an operator concerns several
            parameters, or the optimizer returns to a parameter after others, as for a norm of all of them.
    """
    ops, uses, count = step.ops, step.uses, len(step.storages)
    is_own = is_updating(step)
    own = np.flatnonzero(is_own)
    inside = is_own[uses.op_id]
    use_op, use_storage = uses.op_id[inside], uses.storage_id[inside]
    parameter_of = parameters_of(step)
    known = parameter_of[use_storage] != NONE
    use_op, use_storage = use_op[known], use_storage[known]
    if not len(use_op):
        raise PolicyError("the step has no optimizer update of a known parameter.")
    parameters, use_row = np.unique(parameter_of[use_storage], return_inverse=True)
    of_storage = np.full(count, NONE, dtype=np.int64)
    of_storage[use_storage] = use_row

    # An operator that names one parameter belongs to it, as do the following ones that name none.
    lowest, highest = np.full(len(ops), len(parameters)), np.full(len(ops), NONE)
    np.minimum.at(lowest, use_op, use_row)
    np.maximum.at(highest, use_op, use_row)
    named = np.where(highest[own] != NONE, np.arange(len(own)), np.flatnonzero(highest[own] != NONE)[0])
    carried = own[np.maximum.accumulate(named)]
    owner = np.where(lowest[carried] == highest[carried], highest[carried], NONE)

    is_computed = ~np.isin(ops.name[own], SWAPS)
    computed, owner = own[is_computed], owner[is_computed]
    if np.any(owner == NONE):
        raise PolicyError(_together(step, len(parameters), "in one operator"))
    begins = np.append(True, owner[1:] != owner[:-1])
    rows, runs = np.unique(owner[begins], return_counts=True)
    if np.any(runs > 1):
        again = step.storages.name[parameters[rows[runs > 1][0]]]
        raise PolicyError(_together(step, len(parameters), f"and returns to {again}"))
    first, last = np.full((2, len(parameters)), NONE, dtype=np.int64)
    first[owner[begins]] = computed[begins]
    last[owner[begins]] = computed[np.append(np.flatnonzero(begins)[1:], len(computed)) - 1]
    return SingleUpdates(own, first, last, of_storage)


def parameters_of(step: Step) -> Ints:
    """Returns the parameter storage each storage belongs to, NONE for storages of no parameter."""
    storages = step.storages
    by_name = {str(storages.name[i]): int(i) for i in np.flatnonzero(storages.category == "parameter")}
    owner = np.full(len(storages), NONE, dtype=np.int64)
    for row in np.flatnonzero(np.isin(storages.category, ("parameter", "gradient", "optimizer_state"))):
        name = str(storages.name[row])
        if storages.category[row] == "optimizer_state":
            name = name.rpartition(".")[0]
        owner[row] = by_name.get(name, NONE)
    return owner


def _together(step: Step, count: int, how: str) -> str:
    kinds = ", ".join(dict.fromkeys(str(each.name) for each in step.optimizers)) or "the optimizer"
    return (
        f"{kinds} computes the updates of {count} parameters together ({how}), so that it cannot update one parameter "
        "at a time: leave out in_backward and one_by_one."
    )


def free_gradients(draft: Draft, step: Step, workspace: Ints, numbers: float) -> None:
    """Frees each gradient with the backward operator that completes it, and drops those of earlier steps.

    Args:
        draft: The draft of the step; its storages and uses are replaced.
        step: The step.
        workspace: Bytes of the operators' workspaces, to which those of the updates are added; shape ``(ops,)``.
        numbers: How many numbers an update makes for each one of a gradient.

    Raises:
        PolicyError: Gradients are accumulated, or what an update uses or changes is used before the optimizer's step.
    """
    ops, storages, op, storage = step.ops, step.storages, step.uses.op_id, step.uses.storage_id
    if ops.micro_batch.max(initial=0) > 0:
        raise PolicyError(SECOND_BACKWARD)
    is_update, is_gradient = is_updating(step), storages.category == "gradient"
    used, done = np.full((2, len(storages)), NONE)
    np.maximum.at(used, storage[is_update[op]], op[is_update[op]])
    is_before = op < used[storage]
    makes = is_gradient[storage] & is_before & (ops.phase[op] == "backward")
    begun = np.full(len(storages), len(ops))
    np.minimum.at(begun, storage[makes], op[makes])
    np.maximum.at(done, storage[makes], op[makes])
    is_freed = done != NONE

    owner = parameters_of(step)
    updated = np.full(len(storages), len(ops))  # when the parameter of each gradient and state is updated, and itself
    known = is_freed & (owner != NONE)
    updated[owner[known]] = done[known]
    is_other = ~is_update[op] & (ops.phase[op] != "backward") & ~np.isin(ops.name[op], SWAPS)
    early = storage[is_before & is_other & (owner[storage] != NONE) & (op > updated[owner[storage]])]
    if len(early):
        raise PolicyError(USED if is_gradient[early].any() else EARLY)

    np.add.at(workspace, done[is_freed], (numbers * storages.allocated_bytes[is_freed]).astype(np.int64))
    created = np.where(is_freed & (storages.created_op_id == NONE), begun, storages.created_op_id)
    draft.uses = draft.uses.take(~is_freed[storage] | ((op >= created[storage]) & (op <= done[storage])))
    draft.unsave(np.flatnonzero(is_freed))
    draft.storages = storages.replace(created_op_id=created, freed_op_id=np.where(is_freed, done, storages.freed_op_id))
    draft.remove_storages(np.flatnonzero(is_gradient & ~is_freed & (storages.created_op_id == NONE)))


def eight_bit_bytes(sizes: Ints) -> Ints:
    """Returns the bytes of states of float32 once they are kept in 8 bits.

    Args:
        sizes: Their bytes.
    """
    numbers = sizes // 4
    is_short = (numbers >= _FROM) & (numbers % _BLOCK == 0)
    return np.where(is_short, numbers + numbers // _BLOCK * 4 + _TABLE_BYTES, sizes)
