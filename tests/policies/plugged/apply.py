"""The runtime."""

from __future__ import annotations

from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plugged.policy import Plugged
from memprof.policies.runtime.job import Job


def apply(job: Job, policy: Plugged) -> None:
    """Wraps forwards as checkpoint does."""
    Checkpoint(policy.modules).apply(job)
