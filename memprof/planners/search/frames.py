"""Combinations of the policies that do not choose modules: precision, accumulation, loss, optimizer, shards."""

from __future__ import annotations

import itertools
import math

import numpy as np

from memprof.errors import PolicyError
from memprof.planners.search.workbench import Workbench
from memprof.policies.accumulate.batch import find_batch
from memprof.policies.accumulate.comparisons import compares_samples
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.base import Policy
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.precision.policy import Precision
from memprof.policies.runtime.model_names import module_names
from memprof.policies.shard.policy import Shard
from memprof.policies.swap.policy import Swap
from memprof.trace.schema import NONE
from memprof.trace.step import Step

#: Micro-batch counts to try; higher ones add more calls and free less each.
_MICRO_BATCHES = (2, 4, 8, 16)
_CHUNKS = 8
#: In the stack of every operator that a DataLoader runs.
_DATA_LOADER = "torch/utils/data/dataloader.py:"


def find_frames(bench: Workbench, allowed: set[str], *, world_size: int = 1) -> list[tuple[Policy, ...]]:
    """Combines the policies that apply to the step, each first tried alone.

    Args:
        bench: Replays plans; inapplicable ones stay there with the reason.
        allowed: Names of allowed policies.
        world_size: Number of ranks; shards are tried from two on.

    Returns:
        The combinations, the empty one among them; shortest steps first, by the sum of the policies' own times.
    """
    alternatives = [
        [(), *((policy,) for policy in _fitting(bench, options))]
        for options in (
            _shards(world_size) if "shard" in allowed else (),
            _precisions(bench.step) if "precision" in allowed else (),
            _accumulations(bench) if "accumulate" in allowed else (),
            _losses(bench.step) if "loss" in allowed else (),
            _optimizers(bench.step) if "optimizer" in allowed else (),
            _swaps(bench.step) if "swap" in allowed else (),
        )
    ]
    base = bench.archive[()].step_time_us
    single = [policy for options in alternatives for parts in options for policy in parts]
    extra = {policy: bench.archive[(policy,)].step_time_us - base for policy in single}
    frames = [tuple(itertools.chain.from_iterable(parts)) for parts in itertools.product(*alternatives)]
    return sorted(frames, key=lambda frame: (sum(extra[policy] for policy in frame), len(frame)))


def _fitting(bench: Workbench, options: tuple[Policy, ...]) -> list[Policy]:
    """Tries each alone, and drops those that do not apply or change nothing."""
    base = bench.archive[()]
    found = [(option, bench.try_plan(option)) for option in options]
    # A policy that leaves the peak may help another; one that also leaves the step time is not worth combining.
    same = (base.peak_bytes, base.step_time_us)
    return [option for option, one in found if one is not None and (one.peak_bytes, one.step_time_us) != same]


def _shards(world_size: int) -> tuple[Policy, ...]:
    return tuple(Shard(stage=stage, world_size=world_size) for stage in range(4)) if world_size > 1 else ()


def _precisions(step: Step) -> tuple[Policy, ...]:
    """Returns the applicable reduced precisions: none where the job already computes in one."""
    is_matrix = (step.ops.flops > 0) & (step.ops.phase == "forward")
    wrote = step.uses.take(is_matrix[step.uses.op_id] & (step.uses.role == "write"))
    types = set(step.storages.dtype[wrote.storage_id])
    return (Precision("bf16"),) if types and types <= {"float32", "float64"} else ()


def _accumulations(bench: Workbench) -> tuple[Policy, ...]:
    """Returns micro-batch counts, where the job's batches come from a DataLoader and can be split."""
    why = _why_whole(bench.step)
    if not why:
        return tuple(Accumulate(count) for count in _MICRO_BATCHES if count <= _batch_size(bench.step))
    bench.refused[(Accumulate(_MICRO_BATCHES[0]),)] = why
    return ()


def _why_whole(step: Step) -> str:
    """Explains why the job's batches cannot be split; "" where they can."""
    if not any(_DATA_LOADER in str(frames) for frames in step.stacks.frames):
        return (
            "The job uses no DataLoader, so its batches cannot be split automatically. Write 'for part in "
            "memprof.micro_batches(batch, 2):' in the training loop, and predict that with --accumulate 2."
        )
    if step.undivided:
        return (
            f"The job's batches cannot be split automatically: {step.undivided}. Use a smaller batch in the loader, "
            "and update after several of them, as trainers do with gradient_accumulation_steps."
        )
    if _compares_samples(step):
        return (
            "The loss compares samples of a batch with each other, so micro-batch gradients do not add up to those of "
            "the whole batch. Where fewer pairs are acceptable, predict that with --accumulate 2."
        )
    return ""


def _compares_samples(step: Step) -> bool:
    try:
        return compares_samples(step)
    except PolicyError:  # prediction reports that the batch is unknown
        return False


def _batch_size(step: Step) -> float:
    """Returns the number of samples to divide; infinity where prediction will report that it is unknown."""
    try:
        return find_batch(step).size
    except PolicyError:
        return math.inf


def _losses(step: Step) -> tuple[Policy, ...]:
    """Returns chunked losses: with each module that makes the input of a log-softmax, and without."""
    names = module_names(step)
    softmax = (step.ops.name == "aten._log_softmax.default") & (step.ops.phase == "forward")
    if not softmax.any():
        return ()
    reads = step.uses.storage_id[softmax[step.uses.op_id] & (step.uses.role == "read")]
    makers = np.unique(step.storages.module_id[reads])
    heads = [names[module] for module in makers if module != NONE and names[module]]
    return (*(ChunkedLoss(chunks=_CHUNKS, head=head) for head in heads), ChunkedLoss(chunks=_CHUNKS))


def _optimizers(step: Step) -> tuple[Policy, ...]:
    if not np.any(step.ops.phase == "optimizer"):
        return ()
    return OptimizerPolicy(in_backward=True), OptimizerPolicy(loop="loop")


def _swaps(step: Step) -> tuple[Policy, ...]:
    """Returns what can be offloaded apart from activations: optimizer state."""
    if not np.any(step.storages.category == "optimizer_state"):
        return ()
    return (Swap(what="optimizer", to="host" if step.is_on_device() else "disk"),)
