"""Rewrites a single-rank step into the step of one rank of many."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from memprof.policies.accumulate.batch import find_batch, part_sizes
from memprof.policies.accumulate.scale import scale_step
from memprof.policies.rewrite.draft import Draft
from memprof.policies.shard.prediction.fully import Fully
from memprof.policies.shard.prediction.replicated import Replicated
from memprof.policies.shard.prediction.units import find_units
from memprof.trace.schema import NONE
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


def with_part_of_batch(step: Step, ranks: int) -> Step:
    """Scales everything that grows with the batch to the largest part of any rank.

    Args:
        step: The recorded step.
        ranks: Number of ranks that divide each batch.

    Raises:
        PolicyError: The batch of the step cannot be determined.
    """
    batch = find_batch(step)
    parts = part_sizes(batch.size, ranks)[:1]
    repeats = np.isin(step.ops.phase, ("forward", "backward"))
    scaled = scale_step(step, batch, parts, repeats)
    draft = Draft(step)
    every = np.arange(len(step.ops))
    draft.ops = scaled.ops(every, np.zeros(len(every), dtype=np.int64), repeats)
    rows = np.arange(len(step.storages))
    draft.storages = scaled.storages(rows, np.zeros(len(rows), dtype=np.int64), np.full(len(rows), NONE))
    draft.duration_us = scaled.duration_us(draft.ops)
    return dataclasses.replace(draft.build(), number=step.number)
