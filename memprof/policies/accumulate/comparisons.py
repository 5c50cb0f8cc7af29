"""Whether a loss compares the samples of a batch with one another, so that it is not a mean over them."""

from __future__ import annotations

import numpy as np

from memprof.policies.accumulate.batch import find_batch
from memprof.trace.step import Step

#: Operators whose result has an entry for each pair of the rows of two matrices.
_PAIRS = ("aten.mm.default", "aten.addmm.default", "aten._cdist_forward.default", "aten._euclidean_dist.default")


def compares_samples(step: Step) -> bool:
    """Returns whether forward computes a number for every two samples of the batch, as contrastive losses do.

    That is a matrix with a row and a column for each sample, or for each of several views of it, made from two
    matrices that are computed, at least one of them from the batch. Split into parts, such a loss has fewer pairs:
    another objective.

    Args:
        step: A step that trains.

    Raises:
        PolicyError: No input shows the size of the batch.
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
