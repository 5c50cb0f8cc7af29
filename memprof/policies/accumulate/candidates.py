"""Numbers of micro-batches that a search tries, and what micro-batches change beyond rounding."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.accumulate.batch import computed_from, find_batch, reads_loader, runs_in
from memprof.policies.accumulate.policy import IN_EVALUATION, Accumulate, left_whole
from memprof.policies.base import Candidates
from memprof.policies.rewrite.stack_marks import batch_norms, changed_buffers, draws
from memprof.trace.operator_facts import PAIRS, READS_NUMBER, are_among, is_among
from memprof.trace.schema import NONE, Bools
from memprof.trace.step import Step
from memprof.trace.usages import SETS_LEARNING_RATE, TRAINED_IN_EVALUATION

#: Micro-batch counts tried; higher ones cost more calls and free less each.
_MICRO_BATCHES = (2, 4, 8, 16)
#: Trainers that count batches themselves, and the files that run their loops.
_TRAINERS = {"hf": "transformers/trainer.py:", "lightning": "/pytorch/loops/"}


def candidates(step: Step, world_size: int) -> Candidates:
    """Returns micro-batch counts, where the job's batches come from a DataLoader and can be split."""
    why = _why_whole(step)
    if why:
        return Candidates(unsuitable={Accumulate(_MICRO_BATCHES[0]): why})
    return Candidates(tuple(Accumulate(count) for count in _MICRO_BATCHES if count <= _batch_size(step)))


def _why_whole(step: Step) -> str:
    """Explains why the job's batches cannot be split; "" where they can."""
    if not reads_loader(step):
        return (
            "the job uses no DataLoader, so its batches cannot be split automatically. Write 'for part in "
            "memprof.micro_batches(batch, 2):' in the training loop, and predict that with --accumulate 2."
        )
    framework = next((name for name, place in _TRAINERS.items() if runs_in(step, place)), "")
    if framework:
        return f"in this job {Accumulate.set_in_framework[framework]}"
    if step.undivided:
        return (
            f"the job's batches cannot be split automatically: {step.undivided}. Use a smaller batch in the loader, "
            "and update after several of them, as trainers do with gradient_accumulation_steps."
        )
    if TRAINED_IN_EVALUATION in step.usages:
        return left_whole(f"its batches are not split, as {IN_EVALUATION}", _MICRO_BATCHES[0])
    if SETS_LEARNING_RATE in step.usages:
        return (
            "the job sets the learning rate of each update itself. Where it computes the rate from a count of batches, "
            "it would count micro-batches, and the schedule would advance faster. Use a scheduler of "
            "torch.optim.lr_scheduler; if the schedule may differ, choose the policy yourself with --accumulate 2."
        )
    if _holds(repeats_by_batch, step):
        return (
            "the model calls a module again depending on a number computed from the whole batch, as adaptive solvers "
            "of differential equations do: micro-batches would take other steps. Where that is acceptable, predict it "
            "with --accumulate 2."
        )
    if _holds(compares_samples, step):
        return (
            "the loss compares samples of a batch with each other, so micro-batch gradients do not add up to those of "
            "the whole batch. Where fewer pairs are acceptable, predict that with --accumulate 2."
        )
    return ""


def _holds(question: Callable[[Step], bool], step: Step) -> bool:
    try:
        return question(step)
    except PolicyError:  # the prediction reports that the batch is unknown
        return False


def _batch_size(step: Step) -> float:
    """Returns the number of samples to divide; infinity where prediction will report that it is unknown."""
    try:
        return find_batch(step).size
    except PolicyError:
        return math.inf


def repeats_by_batch(step: Step) -> bool:
    """Returns whether forward calls a module again after reading a number that depends on all samples.

    Adaptive solvers of differential equations choose their next step by the error over the whole batch, and iterations
    end when a residual is small: each micro-batch would take other steps. The number is one float, or a comparison of
    such numbers, computed from inputs and parameters. Values that are read and only printed, after the last call of
    each module, and counts of elements do not matter.

    Raises:
        PolicyError: No input shows the batch size.
    """
    ops, uses, calls = step.ops, step.uses, step.module_calls
    is_read = are_among(ops.name, READS_NUMBER) & (ops.phase == "forward") & (ops.module_id != NONE)
    if not np.any(is_read):
        return False
    decisive = _decisive(step)
    rows = is_read[uses.op_id] & decisive[uses.storage_id]
    for op in np.unique(uses.op_id[rows]).tolist():
        around = (calls.first_op_id <= op) & (calls.last_op_id >= op) & (calls.module_id == ops.module_id[op])
        for first, last in zip(calls.first_op_id[around].tolist(), calls.last_op_id[around].tolist(), strict=True):
            before = calls.module_id[(calls.first_op_id >= first) & (calls.last_op_id < op)]
            after = calls.module_id[(calls.first_op_id > op) & (calls.last_op_id <= last)]
            if len(np.intersect1d(before, after)):
                return True
    return False


def _decisive(step: Step) -> Bools:
    """Returns the storages with one float computed from inputs and parameters, or a comparison of it: (storages,)."""
    uses, storages = step.uses, step.storages
    is_computed = find_batch(step).is_from_input & computed_from(step, storages.category == "parameter")
    is_number = (storages.shape == "") & (storages.created_op_id != NONE)
    is_float = np.array([str(dtype).startswith(("float", "bfloat")) for dtype in storages.dtype], dtype=np.bool_)
    is_float &= is_number & is_computed
    compares = np.zeros(len(step.ops) + 1, dtype=np.bool_)  # the last entry stands for NONE
    compares[uses.op_id[(uses.role == "read") & is_float[uses.storage_id]]] = True
    decisive: Bools = is_float | (is_number & (storages.dtype == "bool") & compares[storages.created_op_id])
    return decisive


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
