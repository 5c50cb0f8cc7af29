"""What micro-batches change beyond rounding: statistics of batches, losses that are not a mean, random draws."""

from __future__ import annotations

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.accumulate.batch import find_batch
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.rewrite.stack_marks import batch_norms, changed_buffers, draws
from memprof.trace.operator_facts import PAIRS, are_among, is_among
from memprof.trace.schema import NONE
from memprof.trace.step import Step


def changes(step: Step, policy: Accumulate) -> tuple[str, ...]:
    """Returns what the micro-batches of a step change in the numbers, one sentence each."""
    found = []
    if norms := batch_norms(step):
        what = f"{len(norms)} BatchNorm layers take" if len(norms) > 1 else "a BatchNorm layer takes"
        found.append(f"{what} statistics over a micro-batch instead of the whole batch")
    owners = step.storages.module_id[changed_buffers(step)[1]].tolist()
    names = dict.fromkeys(str(step.modules.name[each]) for each in owners if each != NONE)
    if others := [name for name in names if name not in norms]:
        more = f" and {len(others) - 3} others" if len(others) > 3 else ""
        found.append(
            f"forward updates buffers of {', '.join(others[:3]) or 'the model'}{more} once for each micro-batch"
        )
    if draws(step):
        found.append("dropout and other draws get other random numbers")
    if is_among(_root(step), {"sum"}):
        found.append(
            "the loss is a sum over its batch, and gradients are averaged as those of a mean: they are up to "
            f"{policy.micro_batches} times smaller"
        )
    try:
        if compares_samples(step):
            found.append("the loss compares samples of a batch with each other, and a micro-batch has fewer pairs")
    except PolicyError:  # the prediction reports that the batch is unknown
        pass
    return tuple(found)


def _root(step: Step) -> str:
    """Returns the operator that made what backward starts from; "" where it is unknown."""
    forward = step.ops.forward_op_id[(step.ops.phase == "backward") & (step.ops.forward_op_id != NONE)]
    return str(step.ops.name[forward[0]]) if len(forward) else ""


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
    paired = are_among(ops.name, PAIRS) & (ops.phase == "forward")
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
