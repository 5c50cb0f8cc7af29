"""Changes to the update: where the optimizer's state is, how large, and when gradients are freed."""

from __future__ import annotations

import re
from functools import partial

import numpy as np

from memprof.analysis.snapshot_plans.change import (
    Change,
    divided,
    made_in,
    most_at_once,
    of_category,
    phase_rows,
    resized,
    with_block,
)
from memprof.errors import PolicyError
from memprof.policies.optimizer.single_updates import eight_bit_bytes
from memprof.policies.rewrite.draft import Draft
from memprof.trace.schema import NONE, Bools, Ints, Storages
from memprof.trace.step import Step

#: Code that needs all gradients before the first update.
_USES_ALL_GRADIENTS = re.compile(r"[/\\]torch[/\\](nn[/\\]utils[/\\]clip_grad|amp[/\\]grad_scaler)\.py:")
#: A file of torch's optimizers in a stack, and those of the files whose updates can run as one kernel on a device.
_OPTIMIZER = re.compile(r"[/\\]torch[/\\]optim[/\\](?!optimizer\.py)(\w+)\.py:")
_FUSED = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}
#: The block of a step counter, which the fused forms of Adam and AdamW keep on the device.
_COUNTER_BYTES = 512
#: Adam and its kin keep two numbers for each element of a parameter.
_ADAM_STATES = 2
#: Allocations of a node of autograd's graph behind that of a parameter's gradient, such as those of a bias.
_ROWS_OF_A_NODE = 2


def update_changes(world_size: int = 1) -> list[Change]:
    """Returns the changes that concern the optimizer.

    Args:
        world_size: Number of ranks to shard state over; 1 for none.
    """
    changes = [
        Change(
            policy="optimizer",
            what="fused update",
            advice="memprof record --optimizer fused, or fused=True in the optimizer's constructor",
            numerics="rounding",
            transform=fused,
            errors=(0.01, 0.01),
        ),
        Change(
            policy="optimizer",
            what="update in backward",
            advice="memprof record --optimizer in-backward, or register_post_accumulate_grad_hook for each parameter",
            numerics="none",
            transform=in_backward,
            errors=(0.01, 0.02),
            frees_gradients=True,
        ),
        Change(
            policy="optimizer",
            what="8-bit optimizer state",
            advice="memprof record --optimizer 8bit, or torchao.optim.AdamW8bit",
            numerics="approximate",
            transform=eight_bit_state,
            errors=(0.01, 0.01),
            is_formula=True,
            assumes="the state is of float32",
        ),
        Change(
            policy="optimizer",
            what="optimizer state in host memory",
            advice="memprof record --optimizer host, or torchao.optim.CPUOffloadOptimizer",
            numerics="none",
            transform=state_elsewhere,
            errors=(0.01, 0.01),
        ),
    ]
    if world_size > 1:
        changes.append(
            Change(
                policy="shard",
                what=f"optimizer state sharded over {world_size} ranks",
                advice="torch.distributed.optim.ZeroRedundancyOptimizer",
                numerics="none",
                transform=partial(sharded_state, world_size=world_size),
                is_formula=True,
                assumes="each rank keeps an equal share",
            )
        )
    return changes


def fused(step: Step) -> Step:
    """Updates in one kernel, which needs no temporaries.

    Raises:
        PolicyError: The updates are of no optimizer with such a form, or it would save nothing.
    """
    kinds = {row: _OPTIMIZER.search(str(frames)) for row, frames in enumerate(step.stacks.frames)}
    known = {row for row, found in kinds.items() if found and found[1] in _FUSED}
    others = sorted({found[1] for found in kinds.values() if found} - _FUSED.keys())
    created = step.storages.created_op_id
    of_optimizer: Bools = np.isin(step.ops.stack_id, sorted(known))[created] & made_in(step, "optimizer")
    temporaries = of_optimizer & of_category(step, "temporary")
    if not known:
        raise PolicyError(
            f"torch has no fused form of its {', '.join(others)}; it has those of {', '.join(_FUSED.values())}."
            if others
            else "the stacks show no optimizer of torch's."
        )
    if not temporaries.any():
        raise PolicyError("the updates allocate nothing that a fused kernel saves.")
    draft = Draft(step)
    draft.remove_storages(np.flatnonzero(temporaries))
    smaller = draft.build()
    counters = most_at_once(step, of_category(step, "gradient"))
    if all(found is None or found[1] == "sgd" for found in kinds.values()) or not counters:
        return smaller
    device = str(step.storages.device[np.flatnonzero(temporaries)[0]])
    return with_block(smaller, "optimizer_state", device, counters * _COUNTER_BYTES, NONE, NONE)


def in_backward(step: Step) -> Step:
    """Frees each gradient where backward has completed it: the next one replaces it. Updates run one by one.

    Raises:
        PolicyError: The step shows no backward, no update, or gradients that outlive it.
    """
    gradients = of_category(step, "gradient")
    if not phase_rows(step, "backward").size or not phase_rows(step, "optimizer").size:
        raise PolicyError("the step shows no backward with an update after it.")
    if any(_USES_ALL_GRADIENTS.search(str(frames)) for frames in step.stacks.frames):
        raise PolicyError("the job clips or unscales gradients, for which it needs all of them at once.")
    made = gradients & made_in(step, "backward")
    if not made.any():
        raise PolicyError("the gradients were made before this step: it accumulates them, or sets them to zero.")
    if step.storages.allocated_bytes[gradients & ~made & (step.storages.freed_op_id == NONE)].sum():
        raise PolicyError("gradients stay from step to step: the job sets them to zero instead of to None.")
    storages, rows = step.storages, np.flatnonzero(made)
    forward = np.append(0, np.cumsum(step.ops.phase == "forward"))
    ends = np.where(storages.freed_op_id[rows] == NONE, len(step.ops) - 1, storages.freed_op_id[rows])
    if (forward[ends + 1] > forward[storages.created_op_id[rows]]).any():
        raise PolicyError("gradients live through a forward: the job accumulates them, or frees them behind it.")
    draft, free_after = Draft(step), completed_after(step, rows)
    draft.free(rows, free_after)
    temporaries = made_in(step, "optimizer") & (storages.category == "temporary")
    copies = _temporaries_of_one(step, temporaries, rows)
    if copies:
        draft.insert_storages(
            Storages.of(
                category=["temporary"] * len(rows),
                device=storages.device[rows],
                requested_bytes=storages.requested_bytes[rows] * copies,
                allocated_bytes=storages.allocated_bytes[rows] * copies,
                created_op_id=free_after,
                freed_op_id=free_after,
            )
        )
    draft.remove_storages(np.flatnonzero(temporaries | (gradients & ~made)))
    return draft.build()


def completed_after(step: Step, gradients: Ints) -> Ints:
    """Returns the operator after which backward has completed each of some gradients.

    That is before the next one is made, and within the allocations of one node of autograd's graph.
    """
    created = step.storages.created_op_id[gradients]
    next_one = np.append(created[1:] - 1, len(step.ops) - 1)[: len(created)]
    found: Ints = np.minimum(np.maximum(next_one, created), created + _ROWS_OF_A_NODE)
    return np.minimum(found, len(step.ops) - 1)


def _temporaries_of_one(step: Step, temporaries: Bools, gradients: Ints) -> int:
    """Returns the temporaries of a parameter's update that are alive at once, as many times the parameter's bytes."""
    sizes = step.storages.requested_bytes
    if not temporaries.any():
        return 0
    largest = int(sizes[gradients].max())
    same = most_at_once(step, temporaries & (sizes == largest))
    own = int(np.count_nonzero(sizes[gradients] == largest))
    return max(1, round(same / own)) if same else 0


def eight_bit_state(step: Step) -> Step:
    """Shrinks Adam's state to 8 bits a number, with a scale for each block of 256.

    Raises:
        PolicyError: The step shows no optimizer state, or it is not Adam's.
    """
    state = _state(step)
    if states_per_parameter(step) != _ADAM_STATES:
        raise PolicyError("the state is not Adam's, of two numbers for each element of a parameter.")
    return resized(step, state, eight_bit_bytes(step.storages.allocated_bytes[state]))


def state_elsewhere(step: Step) -> Step:
    """Keeps the state in host memory; during updates, the device holds that of one parameter.

    Raises:
        PolicyError: The step shows no optimizer state.
    """
    state = _state(step)
    largest = int(step.storages.allocated_bytes[state].max()) * states_per_parameter(step)
    moved = resized(step, state, 0)
    update = phase_rows(step, "optimizer")
    if not len(update):
        return moved
    device = str(step.storages.device[np.flatnonzero(state)[0]])
    return with_block(moved, "optimizer_state", device, largest, update[0], update[-1])


def sharded_state(step: Step, world_size: int) -> Step:
    """Leaves each rank its share of the state.

    Raises:
        PolicyError: The step shows no optimizer state.
    """
    return divided(step, _state(step), world_size)


def states_per_parameter(step: Step) -> int:
    """Returns how many states an optimizer keeps for each parameter, by the sizes that both have; 1 at least."""
    sizes = step.storages.requested_bytes
    state, parameters = of_category(step, "optimizer_state"), of_category(step, "parameter")
    shared = np.intersect1d(sizes[state], sizes[parameters])
    if not len(shared):
        return 1
    is_largest = sizes == shared.max()
    return max(1, round(np.count_nonzero(state & is_largest) / np.count_nonzero(parameters & is_largest)))


def _state(step: Step) -> Bools:
    state = of_category(step, "optimizer_state")
    if not state.any():
        raise PolicyError("the step shows no optimizer state.")
    return state
