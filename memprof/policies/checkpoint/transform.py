"""Rewrites a step into its form under torch's activation checkpointing, exact to the byte."""

from __future__ import annotations

import dataclasses

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.checkpoint.ends import StorageEnds, find_lives
from memprof.policies.checkpoint.kinds import RANDOM_REFUSAL, changes_in_place, kept_operators
from memprof.policies.checkpoint.nodes import find_nodes, with_unread
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.checkpoint.recompute import NEVER, Recompute, plan_recompute
from memprof.policies.checkpoint.regions import Regions, find_regions
from memprof.policies.rewrite.autocast_cache import parameter_casts
from memprof.policies.rewrite.draft import Draft
from memprof.policies.rewrite.insertion import new_ops
from memprof.policies.rewrite.stack_marks import changed_buffers
from memprof.trace.operator_facts import ATTENTION, DETACH
from memprof.trace.schema import NONE, Bools, Ints, Saved
from memprof.trace.step import Step

#: CPU time of torch's checkpoint, in microseconds: for each run of a region and for each tensor saved in one. Measured
#: as the CPU time by which forward and backward of 30 nn.Sequential of 1, 4 and 8 nn.Tanh on 2 x 2 numbers grow when
#: each is a region (131, 204, 281 a region, of which the second forward takes 3 an operator); torch 2.13, one thread.
REGION_US = 110.0
SAVED_TENSOR_US = 18.0
#: The same where outputs are kept: in addition for each region, for each operator in one and each that runs again, and
#: for each kept one. Measured the same way where the operator is not among those kept (27, 52, 88 more) and where its
#: first call is (55, 115, 149 more), on a processor on which the numbers above are 1.27 times smaller.
SELECTIVE_REGION_US = 25.0
SELECTIVE_OPERATOR_US = 5.5
KEPT_OPERATOR_US = 17.0

#: In the type of modules whose buffers are restored after a recompute: running statistics.
_RESTORED = ("BatchNorm", "InstanceNorm")


def transform(step: Step, policy: Checkpoint) -> Step:
    """Rewrites a step.

    Raises:
        PolicyError: The regions cannot be found or cannot run again.
    """
    step = _without_own_inputs(step)
    regions = find_regions(step, policy)
    inputs, casts = _inputs(step, regions)
    nodes = find_nodes(step)
    _refuse_run_again(step, regions)
    _refuse_repeats(step, regions)
    _refuse_own_functions(step, regions)
    step = with_unread(step, nodes)
    is_kept = _kept(step, regions, policy)
    _refuse_changes(step, regions, inputs, is_kept)
    _refuse_changed_buffers(step, regions)
    recompute = plan_recompute(step, regions, nodes, is_kept, casts)
    draft = Draft(step)
    _run_again(draft, step, regions, recompute)
    lives = find_lives(step, regions, nodes, recompute, inputs, is_kept, draft.ranks())
    draft.free(step.storages.storage_id, lives.freed)
    draft.copy_storages(recompute.storage_source, recompute.storage_op, lives.copies_freed)
    draft.insert_storages(lives.states)
    draft.saved = _saved(step, regions, recompute, lives)
    draft.duration_us += _more_time_us(step, regions, recompute, lives, is_kept=is_kept if policy.keep else None)
    return draft.build()


def _without_own_inputs(step: Step) -> Step:
    """Returns a step without the rows of what the job's own checkpoint saves to run its modules again.

    Torch saves these inputs in a node of no operator, so their rows name the operator before it, in another module.
    What reads them again in backward shows how long they are held.
    """
    saved, is_recompute = step.saved, step.ops.is_recompute
    released = saved.released_op_id
    is_own = (released != NONE) & is_recompute[released] & ~is_recompute[saved.forward_op_id]
    return dataclasses.replace(step, saved=saved.take(~is_own)) if is_own.any() else step


def _inputs(step: Step, regions: Regions) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints, Ints]]:
    """Finds the inputs of each region: the older storages that its operators touch.

    Parameters and buffers are included; they stay alive anyway. Parameters in another type are not inputs: autocast
    finds them in its cache.

    Returns:
        Regions and storages of the inputs, one pair a row; and of the casts, with the first operator that reads each.
    """
    is_cast = parameter_casts(step)
    region_rows, storage_rows, op_rows = [], [], []
    for region in range(len(regions)):
        first, last = regions.first[region], regions.last[region]
        rows = slice(*np.searchsorted(step.uses.op_id, [first, last + 1]))
        touched, position = np.unique(step.uses.storage_id[rows], return_index=True)
        is_older = step.storages.created_op_id[touched] < first
        region_rows.append(np.full(np.count_nonzero(is_older), region))
        storage_rows.append(touched[is_older])
        op_rows.append(step.uses.op_id[rows][position[is_older]])
    region_ids, storage_ids, op_ids = map(np.concatenate, (region_rows, storage_rows, op_rows))
    cast = is_cast[storage_ids]
    return (region_ids[~cast], storage_ids[~cast]), (region_ids[cast], storage_ids[cast], op_ids[cast])


def _kept(step: Step, regions: Regions, policy: Checkpoint) -> Bools:
    """Marks the operators whose outputs are kept."""
    if not policy.keep:
        return np.zeros(len(step.ops), dtype=np.bool_)
    kept_names = kept_operators(policy.keep)
    kept: Bools = np.isin(step.ops.name, list(kept_names.always)) & (regions.innermost != NONE)
    for name, numbers in kept_names.calls.items():
        rows = np.flatnonzero((step.ops.name == name) & (regions.innermost != NONE))
        region = regions.innermost[rows]  # regions of operators that are kept do not contain others
        calls = np.arange(len(rows)) - np.searchsorted(region, region) + 1
        kept[rows[np.isin(calls, list(numbers))]] = True
    changes = kept & step.ops.mutates
    if changes.any():
        name = step.ops.name[np.flatnonzero(changes)[0]]
        raise PolicyError(f"{name} changes its input in place, so its output cannot be kept; leave it out of keep.")
    is_random = kept & step.ops.uses_rng & ~np.isin(step.ops.name, ATTENTION)
    if is_random.any():
        raise PolicyError(RANDOM_REFUSAL.format(name=step.ops.name[np.flatnonzero(is_random)[0]]))
    return kept


def _refuse_changes(step: Step, regions: Regions, inputs: tuple[Ints, Ints], is_kept: Bools) -> None:
    """Rejects regions whose recompute would read other values than the first run."""
    uses = step.uses
    is_change = (uses.role == "mutate") & (step.ops.phase[uses.op_id] == "forward")
    op_ids, storage_ids = uses.op_id[is_change], uses.storage_id[is_change]
    is_state = np.isin(step.storages.category[storage_ids], ("parameter", "buffer", "optimizer_state", "gradient"))
    op_ids, storage_ids = op_ids[~is_state], storage_ids[~is_state]
    last_change = np.full(len(step.storages), NONE, dtype=np.int64)
    np.maximum.at(last_change, storage_ids, op_ids)
    wrong = np.flatnonzero(last_change[inputs[1]] >= regions.first[inputs[0]])
    if len(wrong):
        name = step.modules.name[regions.module_id[inputs[0][wrong[0]]]]
        raise PolicyError(
            f"an input of {name} is changed in place, so {name} cannot run again from it; choose modules inside or "
            "around it."
        )
    created = step.storages.created_op_id
    kept_made = (created != NONE) & is_kept[created] & (last_change > created)
    if kept_made.any():
        name = step.ops.name[created[np.flatnonzero(kept_made)[0]]]
        raise PolicyError(
            f"the output of {name} is changed in place later, so it cannot be kept; leave it out of keep."
        )


def _refuse_changed_buffers(step: Step, regions: Regions) -> None:
    """Rejects regions that change their own buffers in place: a recompute would change them again.

    Running statistics of normalisations are restored after a recompute and are allowed.
    """
    op_ids, buffers = changed_buffers(step)
    is_inside = regions.innermost[op_ids] != NONE
    owners = step.storages.module_id[buffers[is_inside]]
    for owner, op in zip(owners.tolist(), op_ids[is_inside].tolist(), strict=True):
        if owner == NONE or not any(kind in str(step.modules.type[owner]) for kind in _RESTORED):
            raise PolicyError(changes_in_place(str(step.modules.name[regions.module_id[regions.innermost[op]]])))


def _refuse_run_again(step: Step, regions: Regions) -> None:
    """Rejects regions that already are, or contain, recomputed code: the job has its own activation checkpointing."""
    parents, calls = step.modules.parent_id, step.module_calls
    around = np.union1d(step.ops.module_id[step.ops.is_recompute], calls.module_id[calls.is_recompute])
    again = around = around[around != NONE]
    while len(around):
        around = np.setdiff1d(parents[around], [NONE])
        again = np.union1d(again, around)
    found = regions.module_id[np.isin(regions.module_id, again)]
    if len(found):
        name = str(step.modules.name[found[0]])
        raise PolicyError(
            f"{name or 'the model'} already runs again in backward, or contains a module that does: the job "
            "checkpoints it itself, or another checkpoint of the plan does; choose modules outside of that, or one "
            "checkpoint for all of them."
        )


def _refuse_repeats(step: Step, regions: Regions) -> None:
    """Rejects regions that backward runs through more than once: each pass would recompute them."""
    ops = step.ops
    rows = np.flatnonzero((ops.forward_op_id != NONE) & ~ops.is_recompute)
    # Backward runs all operators of a node in a row; a repeated pass shows in a second start like the first.
    rows = rows[np.append(True, np.diff(ops.forward_op_id[rows]) != 0)[: len(rows)]]
    owners, first = np.unique(ops.forward_op_id[rows], return_index=True)
    begins_again = ops.name[rows] == ops.name[rows[first]][np.searchsorted(owners, ops.forward_op_id[rows])]
    begins_again[first] = False
    again = regions.innermost[ops.forward_op_id[rows[begins_again]]]
    again = again[again != NONE]
    if len(again):
        name = str(step.modules.name[regions.module_id[again[0]]])
        raise PolicyError(
            f"backward runs through {name or 'the model'} more than once, as with retain_graph=True, so its forward "
            "would run again more than once, which is not predicted; choose modules that it runs through once."
        )


def _refuse_own_functions(step: Step, regions: Regions) -> None:
    """Rejects regions with an autograd.Function, or user hooks, that keep tensors they made themselves.

    The trace does not show whether a function keeps one as a saved tensor, which is dropped and recomputed, or as an
    attribute of its ctx, which stays.
    """
    uses, ops = step.uses, step.ops
    maker, created = ops.forward_op_id[uses.op_id], step.storages.created_op_id[uses.storage_id]
    rows = np.flatnonzero((maker != NONE) & ~ops.is_recompute[uses.op_id] & (created > maker))
    rows = rows[(ops.phase[created[rows]] == "forward") & (regions.innermost[maker[rows]] != NONE)]
    region = regions.innermost[maker[rows]]
    region = region[created[rows] <= regions.last[region]]
    if len(region):
        name = str(step.modules.name[regions.module_id[region[0]]])
        raise PolicyError(
            f"in {name or 'the model'} an autograd.Function or the job's own saved-tensor hooks keep tensors made on "
            "the way, and what checkpoint does to those is not predicted; choose modules without them."
        )


def _run_again(draft: Draft, step: Step, regions: Regions, recompute: Recompute) -> None:
    """Inserts the recomputes. They and the backward of a region use copies of its storages."""
    source, owner, marked = recompute.op_source, recompute.op_region, recompute.marked
    copies = draft.repeat_ops(source, recompute.starts[owner])
    draft.copy_uses(source, copies)
    # Where no operator runs again, torch still detaches the first tensor that the recompute packs, then stops.
    starts = recompute.starts[marked]
    markers = new_ops(
        step,
        DETACH,
        starts,
        module_id=step.ops.module_id[starts],
        duration_us=np.zeros(len(starts)),
        is_recompute=np.ones(len(starts)),
    )
    draft.insert_ops(markers, starts)
    forward = step.ops.forward_op_id
    region = np.concatenate([np.where(forward != NONE, regions.innermost[forward], NONE), owner, marked])
    uses = draft.uses
    draft.uses = uses.replace(storage_id=recompute.storage_read(region[uses.op_id], uses.storage_id)[1])


def _more_time_us(
    step: Step, regions: Regions, recompute: Recompute, lives: StorageEnds, *, is_kept: Bools | None
) -> float:
    """Returns how much longer the step takes: the repeated operators, and the overhead of torch's checkpoint.

    Recorded durations are those of operators alone; the Python time between them is repeated with them. On a device
    both overlap with its work, and only the operators count.
    """
    total_us = float(np.nansum(step.ops.duration_us))
    again_us = float(np.nansum(step.ops.duration_us[recompute.op_source]))
    if step.targets_device():
        return again_us
    saved = np.count_nonzero(regions.innermost[step.saved.forward_op_id] != NONE)
    # Each run of a region takes one random state, and each recompute one more.
    runs = len(lives.states) - np.count_nonzero(recompute.starts != NEVER)
    python_us = runs * REGION_US + saved * SAVED_TENSOR_US
    if is_kept is not None:
        seen = np.count_nonzero(regions.innermost != NONE) + len(recompute.op_source)
        python_us += len(regions) * SELECTIVE_REGION_US + seen * SELECTIVE_OPERATOR_US
        python_us += np.count_nonzero(is_kept) * KEPT_OPERATOR_US
    return again_us * max(1.0, step.duration_us / max(total_us, 1.0)) + python_us


def _saved(step: Step, regions: Regions, recompute: Recompute, lives: StorageEnds) -> Saved:
    """Moves what a region saved to its recompute."""
    saved = step.saved
    region = regions.innermost[saved.forward_op_id]
    rows = np.flatnonzero(region != NONE)
    rows = rows[recompute.starts[region[rows]] != NEVER]
    found, read = recompute.storage_read(region[rows], saved.storage_id[rows])
    storage_ids, forward_op_ids = saved.storage_id.copy(), saved.forward_op_id.copy()
    storage_ids[rows] = read
    saves = lives.save_op(recompute, region[rows], saved.forward_op_id[rows])
    # Inputs of a kept operator are saved again without it: no earlier than they exist, such as a weight's new cast.
    is_own = found == region[rows]
    made = recompute.storage_op[read[is_own] - len(step.storages)]
    saves[is_own] = np.maximum(saves[is_own], made)
    forward_op_ids[rows] = saves
    return saved.replace(storage_id=storage_ids, forward_op_id=forward_op_ids)
