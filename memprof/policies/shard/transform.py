"""Rewrites a single-rank step into the step of one rank of many."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memprof.policies.shard.prediction.fully import Fully
from memprof.policies.shard.prediction.replicated import Replicated
from memprof.policies.shard.prediction.units import find_units
from memprof.policies.shard.samples import with_part_of_batch
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.shard.policy import Shard


def transform(step: Step, policy: Shard) -> Step:
    """Shards what the stage shards, and adds the collectives, concurrent with the computation.

    In stages 0 and 1 each gradient moves into a bucket when it is complete, and the buckets are sent while backward
    runs; in stage 1 the ranks exchange their results after the update. In stages 2 and 3 a unit's parameters are
    gathered into one buffer and copied from there, and its gradients are copied into one buffer and scattered, at the
    same points as in torch's fully_shard. A single rank is predicted as recorded.

    Source: Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models", for the
    stages; Zhao et al. 2023, "PyTorch FSDP", for units and prefetch; timing and buffers as in
    torch.distributed.fsdp.fully_shard of torch 2.13.

    Raises:
        PolicyError: A unit's pattern matches no module, or the batch cannot be split.
    """
    units = find_units(step, policy.units)
    if policy.world_size == 1:
        return step
    if policy.batch == "split":
        step = with_part_of_batch(step, policy.world_size)
    built = Fully(step, policy, units) if policy.stage >= 2 else Replicated(step, policy)
    return built.build()
