"""Changes to sizes: the loss in chunks, a smaller micro-batch, half precision."""

from __future__ import annotations

import re
from functools import partial

import numpy as np

from memprof.analysis.snapshot_plans.change import Change, divided, made_in, of_category, phase_rows, with_block
from memprof.analysis.snapshot_plans.updates import completed_after
from memprof.errors import PolicyError
from memprof.policies.rewrite.draft import Draft
from memprof.replay.live import sum_during
from memprof.trace.operator_facts import DROPOUT, STAYS_FP32
from memprof.trace.schema import NONE, Bools, Ints, Texts
from memprof.trace.step import Step

#: Parts that a loss and a batch are divided into.
_CHUNKS, _PARTS = 8, 2


def size_changes() -> list[Change]:
    """Returns the changes that divide tensors, those by replay of recorded lives first."""
    return [
        Change(
            policy="loss",
            what=f"head and loss in {_CHUNKS} chunks",
            advice=f"memprof record --loss {_CHUNKS},HEAD, or a fused linear cross-entropy such as Liger Kernel's",
            numerics="rounding",
            transform=partial(chunked_loss, chunks=_CHUNKS),
            errors=(0.03, 0.03),
            assumes="the last tensors of forward are logits, one row for each token",
        ),
        Change(
            policy="accumulate",
            what=f"{_PARTS} micro-batches",
            advice=f"memprof record --accumulate {_PARTS}, or half the batch and two backwards before each update",
            numerics="rounding",
            transform=partial(micro_batches, parts=_PARTS),
            errors=(0.03, 0.05),
            is_formula=True,
            assumes="all activations grow with the batch",
        ),
        Change(
            policy="precision",
            what="bf16 (autocast)",
            advice="torch.autocast('cuda', dtype=torch.bfloat16)",
            numerics="approximate",
            transform=half_precision,
            errors=(0.10, 0.25),
            is_formula=True,
            assumes="the job computes in float32, and all activations are halved",
        ),
    ]


def chunked_loss(step: Step, chunks: int) -> Step:
    """Divides the logits and what the loss makes of them.

    Raises:
        PolicyError: The step has no backward, or the last tensors of forward are not larger than all others.
    """
    if not len(phase_rows(step, "backward")):
        raise PolicyError("the step shows no backward.")
    logits = find_logits(step)
    if not logits.any():
        raise PolicyError(
            "the last tensors of forward are not larger than those of the layers: there are no logits to divide."
        )
    return divided(step, logits | _made_while_held(step, logits), chunks)


def _made_while_held(step: Step, logits: Bools) -> Bools:
    """Returns which storages backward makes and frees while it holds the logits' gradient: kernels' own memory."""
    storages = step.storages
    is_held = (sum_during(storages.take(logits), len(step.ops)) > 0) & (step.ops.phase == "backward")
    created, freed = storages.created_op_id, storages.freed_op_id
    ends: Bools = (created != NONE) & (freed != NONE) & is_held[created] & is_held[freed]
    return ends & of_category(step, "temporary", "workspace")


def micro_batches(step: Step, parts: int) -> Step:
    """Divides the batch: activations are a part of their size, gradients are there from the first part on.

    Raises:
        PolicyError: Nothing grows with the batch.
    """
    grows = of_category(step, "activation", "input")
    sizes = step.storages.requested_bytes
    weights = np.unique(sizes[of_category(step, "gradient", "parameter")])
    grows |= of_category(step, "temporary") & ~made_in(step, "optimizer") & ~np.isin(sizes, weights)
    if not grows.any():
        raise PolicyError("the step shows no activations.")
    smaller = divided(step, grows, parts)
    gradients = np.flatnonzero(of_category(step, "gradient") & made_in(step, "backward"))
    draft, storages = Draft(smaller), smaller.storages
    ends = storages.freed_op_id[gradients]
    draft.copy_storages(gradients, np.full(len(gradients), NONE), ends)
    draft.free(gradients, completed_after(step, gradients))
    return draft.build()


#: Dropout keeps a mask of one byte for each number of four that it returns, whatever their type.
_MASKS_IN_RESULT = 4
#: Innermost frames whose functions name an operator, where C++ frames are missing.
_FUNCTIONAL = re.compile(r"[/\\]torch[/\\]nn[/\\]functional\.py:\d+:(\w+)$")
#: Allocations around the end of forward among which the loss's own are: softmax, its logarithm, their gradients.
_NEAR = 16
#: Smaller logits are not worth a change of their own.
_LEAST_BYTES = 1 << 20


def half_precision(step: Step) -> Step:
    """Halves what forward and backward make, and adds a copy of the weights in 16 bits while both run.

    The loss runs in float32: it gets a copy of the logits' logarithm, and returns a gradient that is then cast.

    Raises:
        PolicyError: The step shows no forward.
    """
    forward, backward = phase_rows(step, "forward"), phase_rows(step, "backward")
    if not len(forward):
        raise PolicyError("the step shows no forward.")
    made = of_category(step, "activation") | (of_category(step, "temporary") & ~made_in(step, "optimizer"))
    names = _operator_names(step)
    logits = find_logits(step)
    halved = made & ~_matches(names, STAYS_FP32) & ~_masks(step, names)
    weights = int(step.storages.allocated_bytes[of_category(step, "parameter")].sum()) // 2
    ends = max(forward[-1], backward[-1] if len(backward) else 0)
    changed = _loss_in_float32(divided(step, halved | logits, 2), step, logits)
    return with_block(changed, "temporary", str(step.storages.device[0]), weights, forward[0], ends)


def _operator_names(step: Step) -> Texts:
    """Returns the name of the operator that made each storage, without ``aten.``; "" where unknown, ``(storages,)``."""
    by_stack = {}
    for stack, frames in zip(step.stacks.stack_id.tolist(), step.stacks.frames.tolist(), strict=True):
        found = _FUNCTIONAL.search(str(frames).partition("\n")[0])
        by_stack[stack] = found[1] if found else ""
    names = [
        name.removeprefix("aten.") if name.startswith("aten.") else by_stack.get(stack, "")
        for name, stack in zip(step.ops.name.tolist(), step.ops.stack_id.tolist(), strict=True)
    ]
    created = step.storages.created_op_id
    found_names: Texts = np.where(created != NONE, np.array(names, dtype=object)[np.maximum(created, 0)], "")
    return found_names


def _matches(names: Texts, pattern: re.Pattern[str]) -> Bools:
    known = {name: pattern.match(name) is not None for name in set(names.tolist())}
    return np.array([known[name] for name in names.tolist()], dtype=np.bool_)


def _masks(step: Step, names: Texts) -> Bools:
    """Returns which storages are masks of dropout: a quarter of another that the same stack makes."""
    storages = step.storages
    dropped = np.flatnonzero(_matches(names, DROPOUT))
    stacks, sizes = step.ops.stack_id[storages.created_op_id[dropped]], storages.requested_bytes[dropped]
    results = set(zip(stacks.tolist(), sizes.tolist(), strict=True))
    masks = np.zeros(len(storages), dtype=np.bool_)
    masks[dropped] = [(stack, _MASKS_IN_RESULT * size) in results for stack, size in zip(stacks, sizes, strict=True)]
    return masks


def _loss_in_float32(halved: Step, step: Step, logits: Bools) -> Step:
    """Returns a step whose loss gets its input in float32 from a log-softmax in 16 bits, as ``cross_entropy`` runs.

    Args:
        halved: The step with logits, and what the loss makes of their size, halved.
        step: The step as it was recorded.
        logits: These storages.
    """
    rows = np.flatnonzero(logits)
    rows = rows[np.argsort(step.storages.created_op_id[rows], kind="stable")]
    is_backward = made_in(step, "backward")[rows]
    draft = Draft(halved)
    created, freed, sizes = step.storages.created_op_id, step.storages.freed_op_id, step.storages.allocated_bytes
    for place in np.flatnonzero(~is_backward[:-1] & is_backward[1:]).tolist():
        last, first = int(rows[place]), int(rows[place + 1])
        following = rows[place + 2 : place + 3]
        is_cast = bool(len(following)) and is_backward[place + 2] and created[following[0]] > created[first]
        until = int(created[following[0]]) - 1 if is_cast else int(freed[first])
        _add(draft, last, int(sizes[last]), int(created[last]), int(created[first]))
        _add(draft, first, int(sizes[first]) - int(halved.storages.allocated_bytes[first]), int(created[first]), until)
    return draft.build()


def _add(draft: Draft, like: int, size_bytes: int, created: int, freed: int) -> None:
    """Inserts a storage like another, of another size and life."""
    (row,) = draft.copy_storages(np.array([like]), np.array([created]), np.array([freed])).tolist()
    for column in ("allocated_bytes", "requested_bytes"):
        sizes: Ints = getattr(draft.storages, column).copy()
        sizes[row] = size_bytes
        draft.storages = draft.storages.replace(**{column: sizes})


def find_logits(step: Step) -> Bools:
    """Returns which storages are logits or of their size, around the end of forward; none if others are as large."""
    storages, created = step.storages, step.storages.created_op_id
    backward = phase_rows(step, "backward")
    is_last = np.zeros(len(step.ops), dtype=np.bool_)
    # Each backward begins where the row before it is not backward's.
    for begin in backward[np.append(True, np.diff(backward) > 1)[: len(backward)]].tolist():
        is_last[max(0, begin - _NEAR) : begin + _NEAR] = True
    moves = of_category(step, "activation", "temporary") & (created != NONE) & ~made_in(step, "optimizer")
    near = moves & is_last[np.maximum(created, 0)]
    size = int(storages.requested_bytes[near].max(initial=0))
    logits: Bools = near & np.isin(storages.requested_bytes, (size, size // 2))
    has_larger = int(storages.requested_bytes[moves & ~near].max(initial=0)) >= size
    if size < _LEAST_BYTES or has_larger or logits.sum() < 2:
        return np.zeros(len(storages), dtype=np.bool_)
    return logits
