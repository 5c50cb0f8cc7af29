"""Rewrites the updates of a recorded step: their form, their state and when they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.optimizer.eight_bit import eight_bit_bytes
from memprof.policies.optimizer.forms import FormWriter
from memprof.policies.optimizer.recognise import (
    GRADIENT,
    NEGATIONS,
    PARAMETER,
    Update,
    Updates,
    gradients_of_earlier_steps,
    recognise_updates,
)
from memprof.policies.optimizer.refusals import FUSED_SGD, no_form
from memprof.policies.optimizer.seen import refuse_gradients, refuse_loop, refuse_optimizers
from memprof.policies.optimizer.single_updates import CALL_US, SWAPS, blocks_of, keep_out
from memprof.policies.rewrite.draft import Draft
from memprof.policies.rewrite.insertion import Insertion
from memprof.trace.schema import NONE, Bools, Floats, Ints
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.optimizer.policy import OptimizerPolicy

#: Default host-device transfer rate for pinned memory, if none was measured: PCIe 4.0 x16 in practice.
_HOST_BYTES_PER_US = 24_000.0

#: Bytes from which malloc takes new pages for a block (glibc's M_MMAP_THRESHOLD).
_NEW_PAGES = 128 << 10

_EIGHT_BIT_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def transform(step: Step, policy: OptimizerPolicy) -> Step:
    """Rewrites the updates of a step.

    Raises:
        PolicyError: The step has no updates, or none that the policy can change.
    """
    refuse_optimizers(step, policy)
    if policy.in_backward:
        refuse_loop(step)
        step = keep_out(step)
    updates = recognise_updates(step)
    form = policy.loop or updates.form
    _check(step, updates, policy, form)
    draft = Draft(step)
    storages = draft.storages
    if policy.state == "8bit":
        sizes = _eight_bit_bytes(step, updates)
        dtype = storages.dtype.copy()
        dtype[sizes != storages.allocated_bytes] = "uint8"
        draft.storages = storages.replace(allocated_bytes=sizes, requested_bytes=sizes, dtype=dtype)
        form = "fused"  # one kernel per parameter, compiled or the library's own
    if policy.in_backward:
        draft.remove_storages(gradients_of_earlier_steps(step, updates))
    if policy.in_backward and form == updates.form == "loop" and not policy.state:
        if not updates.algorithm:
            blocks_of(step, updates)  # raises if updates depend on each other
        _move(draft, step, updates)
    elif form != updates.form or policy.in_backward or policy.state:
        _rewrite(draft, step, updates, form, policy)
    return draft.build()


def _check(step: Step, updates: Updates, policy: OptimizerPolicy, form: str) -> None:
    keeps_form = form == updates.form == "loop" and not policy.state
    if not keeps_form and np.isin(step.ops.name[updates.ops], SWAPS).any():
        raise PolicyError(
            "Swapped parameters or state can only be predicted with a loop over parameters, with or without "
            "in_backward. Leave foreach and fused out, or leave swap out."
        )
    is_negated = form != "fused" and np.isin(step.ops.name[updates.ops], NEGATIONS).any()
    if not keeps_form and (is_negated or not updates.algorithm):
        raise PolicyError(
            "Unsupported optimizer: only Adam, AdamW, SGD, RMSprop and Adagrad can be predicted in full; for others "
            "only in_backward can be predicted, and only if they run as a loop."
        )
    rows = np.array([update.storages[PARAMETER] for update in updates.updates], dtype=np.int64)
    parameters = step.storages.take(rows)
    is_short = np.any(np.isin(parameters.dtype, ("bfloat16", "float16")) & (parameters.device == "cpu"))
    if policy.loop == "fused" and updates.algorithm == "sgd" and is_short:
        raise PolicyError(FUSED_SGD)
    if policy.loop == "fused" and updates.algorithm == "rmsprop":
        raise PolicyError(no_form("RMSprop", policy.loop))  # also where the recording lacks the optimizer's settings
    if policy.state == "8bit" and updates.algorithm != "adam":
        raise PolicyError("8-bit state is predicted for Adam and AdamW only.")
    if policy.state == "host" and "cpu" in set(step.storages.device[step.storages.category == "parameter"]):
        raise PolicyError("The parameters and the optimizer state are already in host memory; host changes nothing.")
    if not policy.in_backward:
        return
    refuse_gradients(step, updates)
    missing = [update.name for update in updates.updates if update.completed_by == NONE]
    if missing:
        raise PolicyError(
            f"The recording does not show when backward completes the gradient of {missing[0]}; step-in-backward "
            "cannot be predicted."
        )


def _move(draft: Draft, step: Step, updates: Updates) -> None:
    """Moves the operators of a loop, whatever they are, to the points where backward completes each gradient."""
    ops, storages = step.ops, step.storages
    completed = np.array([update.completed_by for update in updates.updates], dtype=np.int64)
    place = completed[updates.owner]
    order = np.argsort(place, kind="stable")
    moved, place = updates.ops[order], place[order]
    rows = ops.take(moved)
    phase = np.full(len(moved), "backward", dtype=np.object_)
    ids = draft.insert_ops(
        rows.replace(phase=phase, module_id=ops.module_id[place], micro_batch=ops.micro_batch[place]), place + 1
    )
    new_of = np.arange(len(ops) + 1)
    new_of[-1] = NONE
    new_of[moved] = ids
    last_of = np.full(len(ops), NONE, dtype=np.int64)  # of the block behind each operator that completes a gradient
    last_of[place] = ids
    draft.copy_uses(moved, ids)

    created, freed = storages.created_op_id, storages.freed_op_id.copy()
    is_own: Bools = np.zeros(len(ops) + 1, dtype=np.bool_)
    is_own[moved] = True
    block_of = np.full(len(ops) + 1, NONE, dtype=np.int64)
    block_of[moved] = last_of[place]
    # Storages an update allocates are freed with the call that updates this parameter alone, within that call.
    made = is_own[created]
    is_held = made & ((freed == NONE) | (block_of[freed] != block_of[created]))
    new_freed = np.where(is_held, block_of[created], new_of[freed])
    draft.storages = storages.replace(created_op_id=new_of[created], freed_op_id=new_freed)
    _free_with_blocks(draft, step, updates, last_of)
    draft.remove_ops(moved)
    draft.duration_us += CALL_US * (len(updates.updates) - 1)


def _rewrite(draft: Draft, step: Step, updates: Updates, form: str, policy: OptimizerPolicy) -> None:
    """Rewrites the updates in another form, or one parameter at a time."""
    ops = step.ops
    durations: Floats = np.nan_to_num(ops.duration_us)
    spent = float(durations[updates.ops].sum())
    launch_us, us_per_byte = _cost(step, updates, form)
    insertion = Insertion(draft)
    writer = FormWriter(insertion, step, updates.algorithm, launch_us, us_per_byte)
    last_of = np.full(len(ops), NONE, dtype=np.int64)
    first = int(updates.ops[0])
    lasts: Ints | None = None
    if policy.in_backward:
        for update in sorted(updates.updates, key=lambda update: update.completed_by):
            place = update.completed_by
            last_of[place] = _write_one(insertion, writer, step, form, update, policy, like=place, before=place + 1)
    elif policy.state == "host":
        for update in updates.updates:
            _write_one(insertion, writer, step, form, update, policy, like=first, before=first)
    else:
        lasts = _write_calls(writer, step, form, updates)
    last = insertion.next_op - 1
    insertion.write()
    storages = draft.storages
    count = len(step.storages)
    created, freed = storages.created_op_id[:count], storages.freed_op_id.copy()
    gone = np.isin(created, updates.ops)
    dying = np.flatnonzero(np.isin(freed[:count], updates.ops) & ~gone)
    freed[dying] = last if lasts is None else lasts[np.searchsorted(updates.ops, freed[dying])]
    allocated, device = storages.allocated_bytes.copy(), storages.device.copy()
    if policy.state == "host":
        away = np.array([storage for update in updates.updates for storage in state_of(step, update)], dtype=np.int64)
        allocated[away], device[away] = 0, "cpu"  # pinned host memory is outside the device allocator
    draft.storages = storages.replace(freed_op_id=freed, allocated_bytes=allocated, device=device)
    if policy.in_backward:
        _free_with_blocks(draft, step, updates, last_of)
    draft.remove_storages(np.flatnonzero(gone))
    draft.remove_ops(updates.ops)
    pace = step.duration_us / max(float(durations.sum()), 1e-9)
    calls = len(updates.updates) - 1 if policy.in_backward or policy.state == "host" else 0
    draft.duration_us += pace * (insertion.duration_us - spent) + CALL_US * calls


def _write_calls(writer: FormWriter, step: Step, form: str, updates: Updates) -> Ints:
    """Emits each optimizer call in place of the recorded one; a step with several models has several.

    Returns:
        For each operator of the recorded updates, the last operator of the call that replaces it.

    Raises:
        PolicyError: A parameter is updated more than once.
    """
    calls = call_of_operators(step, updates)
    own = np.full(len(step.ops), NONE, dtype=np.int64)
    own[updates.ops] = calls
    uses = step.uses
    parameters = np.array([update.storages[PARAMETER] for update in updates.updates], dtype=np.int64)
    rows = np.flatnonzero((own[uses.op_id] != NONE) & np.isin(uses.storage_id, parameters))
    earliest = np.full(len(step.storages), len(calls), dtype=np.int64)
    latest = np.full(len(step.storages), NONE, dtype=np.int64)
    np.minimum.at(earliest, uses.storage_id[rows], own[uses.op_id[rows]])
    np.maximum.at(latest, uses.storage_id[rows], own[uses.op_id[rows]])
    twice = np.flatnonzero(earliest[parameters] != latest[parameters])
    if len(twice):
        raise PolicyError(
            f"The step updates {updates.updates[twice[0]].name} more than once; the form of its updates cannot be "
            "predicted. Record steps that end with each update (memprof.record and its step())."
        )
    lasts = np.full(len(calls), NONE, dtype=np.int64)
    for call in np.unique(calls):
        first = int(updates.ops[calls == call][0])
        mine = [update for update in updates.updates if earliest[update.storages[PARAMETER]] == call]
        lasts[calls == call] = writer.write(form, mine, like=first, before=first)
    return lasts


def call_of_operators(step: Step, updates: Updates) -> Ints:
    """Numbers the optimizer calls of the updates' operators; forward or backward separates two calls."""
    is_training = np.isin(step.ops.phase, ("forward", "backward"))
    before = np.cumsum(is_training)[updates.ops]
    return np.cumsum(np.append(0, np.diff(before) > 0)[: len(before)])


def _write_one(
    insertion: Insertion,
    writer: FormWriter,
    step: Step,
    form: str,
    update: Update,
    policy: OptimizerPolicy,
    *,
    like: int,
    before: int,
) -> int:
    """Emits the update of one parameter; host state is copied in before and out after."""
    module = int(step.ops.module_id[like]) if policy.in_backward else NONE
    brought: dict[int, int] = {}
    sizes = step.storages.allocated_bytes
    if policy.state == "host":
        for storage in state_of(step, update):
            op = insertion.op(
                "aten._to_copy.default",
                like=like,
                before=before,
                reads=[storage],
                writes=[insertion.next_storage],
                duration_us=sizes[storage] / _HOST_BYTES_PER_US,
                kind="copy",
                module_id=module,
            )
            brought[storage] = insertion.storage(int(sizes[storage]), op, category="optimizer_state")
    last = writer.write(form, [update], like=like, before=before, module_id=module, replaced=brought)
    for storage, copy in brought.items():
        last = insertion.op(
            "aten.copy_.default",
            like=like,
            before=before,
            reads=[copy],
            mutates=[storage],
            duration_us=sizes[storage] / _HOST_BYTES_PER_US,
            kind="copy",
            module_id=module,
        )
        insertion.free(copy, last)
    return last


def _free_with_blocks(draft: Draft, step: Step, updates: Updates, last_of: Ints) -> None:
    """Frees gradients with their updates, and storages that die with an accumulation after the update inside it."""
    storages = draft.storages
    freed, created = storages.freed_op_id.copy(), storages.created_op_id.copy()
    is_known = (freed != NONE) & (freed < len(last_of))
    behind = last_of[np.where(is_known, freed, 0)]
    freed = np.where(is_known & (behind != NONE), behind, freed)
    uses, ops = step.uses, step.ops
    for update in updates.updates:
        gradient = update.storages[GRADIENT]
        freed[gradient] = last_of[update.completed_by]
        if created[gradient] == NONE:
            # It outlived the last step (set_to_none=False). Otherwise backward's own result becomes the gradient, with
            # nothing to set it to zero.
            touching = np.unique(uses.op_id[uses.storage_id == gradient])
            created[gradient] = touching[ops.phase[touching] == "backward"][0]
            draft.remove_ops(touching[touching < created[gradient]])
    draft.storages = storages.replace(freed_op_id=freed, created_op_id=created)


def state_of(step: Step, update: Update) -> list[int]:
    """Returns the state of an update that is worth moving: not the step counters, which are single numbers."""
    state = [storage for key, storage in update.storages.items() if key not in (PARAMETER, GRADIENT)]
    return [storage for storage in state if step.storages.shape[storage] != ""]


def _eight_bit_bytes(step: Step, updates: Updates) -> Ints:
    sizes = step.storages.allocated_bytes.copy()
    keys = [update.storages.get(key, NONE) for update in updates.updates for key in _EIGHT_BIT_STATE]
    state = np.array([storage for storage in keys if storage != NONE], dtype=np.int64)
    sizes[state] = eight_bit_bytes(sizes[state])
    return sizes


def _cost(step: Step, updates: Updates, form: str) -> tuple[float, float]:
    """Splits the duration of the recorded updates into a launch cost per operator and a time per byte.

    On the CPU most of the time of operators that allocate goes into new pages, of which a fused kernel needs none.
    """
    durations, ops = np.nan_to_num(step.ops.duration_us), updates.ops
    if form == "fused" and not step.targets_device():
        in_place = ops[step.born_bytes()[ops] < _NEW_PAGES]
        ops = in_place if len(in_place) else ops
    spent, uses = durations[ops], step.uses
    rows = np.isin(uses.op_id, ops)
    touched = float(step.storages.allocated_bytes[uses.storage_id[rows]].sum())
    work = spent[step.ops.name[ops] != "aten._local_scalar_dense.default"]
    tensors = max(1, len(updates.updates)) if updates.form == "foreach" else 1
    launch = float(np.percentile(work, 25)) / tensors if len(work) else 0.0
    rest = max(0.0, float(spent.sum()) - launch * tensors * len(work))
    return launch, rest / max(touched, 1.0)
