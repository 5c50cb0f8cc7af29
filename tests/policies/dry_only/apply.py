"""The runtime."""

from __future__ import annotations

from memprof.policies.dry_only.policy import DryOnly
from memprof.policies.precision.policy import Precision
from memprof.policies.runtime.job import Job


def apply(job: Job, policy: DryOnly) -> None:
    """Applies a policy of memprof's."""
    Precision(policy.dtype).apply(job)
