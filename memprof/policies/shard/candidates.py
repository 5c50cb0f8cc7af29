"""Sharding settings that a search tries."""

from __future__ import annotations

from memprof.policies.base import Candidates
from memprof.policies.shard.policy import Shard
from memprof.trace.step import Step


def candidates(step: Step, world_size: int) -> Candidates:
    """Returns every ZeRO stage, from two ranks on."""
    return Candidates(tuple(Shard(stage=stage, world_size=world_size) for stage in range(4)) if world_size > 1 else ())
