"""Changes to sizes: the loss in chunks, a smaller micro-batch, half precision."""

from __future__ import annotations

from functools import partial

import numpy as np

from memprof.analysis.snapshot_plans.change import Change, divided, made_in, of_category, phase_rows
from memprof.analysis.snapshot_plans.half_precision import find_logits, half_precision
from memprof.analysis.snapshot_plans.updates import completed_after
from memprof.errors import PolicyError
from memprof.policies.rewrite.draft import Draft
from memprof.replay.live import sum_during
from memprof.trace.schema import NONE, Bools
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

    Args:
        step: The step.
        chunks: Number of chunks.

    Raises:
        PolicyError: The step has no backward, or the last tensors of forward are not larger than all others.
    """
    if not len(phase_rows(step, "backward")):
        raise PolicyError("The step shows no backward.")
    logits = find_logits(step)
    if not logits.any():
        raise PolicyError(
            "The last tensors of forward are not larger than those of the layers: there are no logits to divide."
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

    Args:
        step: The step.
        parts: Number of micro-batches.

    Raises:
        PolicyError: Nothing grows with the batch.
    """
    grows = of_category(step, "activation", "input")
    sizes = step.storages.requested_bytes
    weights = np.unique(sizes[of_category(step, "gradient", "parameter")])
    grows |= of_category(step, "temporary") & ~made_in(step, "optimizer") & ~np.isin(sizes, weights)
    if not grows.any():
        raise PolicyError("The step shows no activations.")
    smaller = divided(step, grows, parts)
    gradients = np.flatnonzero(of_category(step, "gradient") & made_in(step, "backward"))
    draft, storages = Draft(smaller), smaller.storages
    ends = storages.freed_op_id[gradients]
    draft.copy_storages(gradients, np.full(len(gradients), NONE), ends)
    draft.free(gradients, completed_after(step, gradients))
    return draft.build()
