"""Detects losses that compare the samples of a batch with one another and thus are not a mean over them."""

from __future__ import annotations

import numpy as np

from memprof.policies.accumulate.batch import find_batch
from memprof.trace.step import Step

#: Operators whose result has one entry per pair of rows of two matrices.
_PAIRS = ("aten.mm.default", "aten.addmm.default", "aten._cdist_forward.default", "aten._euclidean_dist.default")


def compares_samples(step: Step) -> bool:
    """Returns whether forward computes a value for every pair of samples, as contrastive losses do.

    Such a value lies in a matrix with a row and a column per sample (or per view of it), the product of two computed
    matrices, at least one of them from the batch. Split into micro-batches, such a loss has fewer pairs and is a
    different objective.

    Args:
        step: A training step.

    Raises:
        PolicyError: No input shows the batch size.
    """
    batch = find_batch(step)
    ops, uses, storages = step.ops, step.uses, step.storages
    paired = np.isin(ops.name, _PAIRS) & (ops.phase == "forward")
    is_made = (uses.role == "write") & paired[uses.op_id]
    shapes = storages.shape.astype(str)
    for op, result in zip(uses.op_id[is_made].tolist(), uses.storage_id[is_made].tolist(), strict=True):
        sizes = shapes[result].split("x")
        if len(sizes) != 2 or sizes[0] != sizes[1] or int(sizes[0]) % batch.size:
            continue
        operands = uses.storage_id[(uses.op_id == op) & (uses.role == "read")]
        is_weight = np.isin(storages.category[operands], ("parameter", "buffer"))
        if np.any(batch.is_from_input[operands]) and not np.any(is_weight):
            return True
    return False
