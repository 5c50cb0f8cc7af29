"""Refuses to shard a running job: so far memprof predicts it only."""

from __future__ import annotations

from typing import NoReturn

from memprof.errors import PolicyError
from memprof.policies.job import Job
from memprof.policies.shard.policy import Shard


def apply_shard(job: Job, policy: Shard) -> NoReturn:
    """Refuses, and changes nothing.

    Raises:
        PolicyError: Always.
    """
    instead = (
        "torch.nn.parallel.DistributedDataParallel",
        "DistributedDataParallel with torch.distributed.optim.ZeroRedundancyOptimizer",
        "DeepSpeed's ZeRO stage 2",
        "torch.distributed.fsdp.fully_shard",
    )[policy.stage]
    raise PolicyError(
        f"shard can be predicted but not applied yet; to shard the job, write {instead} into it and start it with "
        "torchrun, and take shard out of the plan that 'memprof record' applies."
    )
