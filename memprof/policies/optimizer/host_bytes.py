"""The optimizer state that may be kept in host memory, and the pinned memory that it takes there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memprof.replay.rounding import rounded_when_pinned
from memprof.trace.schema import Bools
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.optimizer.policy import OptimizerPolicy


def host_bytes(step: Step, policy: OptimizerPolicy) -> int:
    """Returns the pinned bytes of the state that a policy keeps in host memory.

    Args:
        step: The step before the policy.
        policy: The policy; nothing else of it matters.
    """
    sizes = step.storages.requested_bytes[moved_state(step)]
    return int(rounded_when_pinned(sizes, step.allocator_settings).sum())


def moved_state(step: Step) -> Bools:
    """Returns which storages are optimizer state, but for single numbers such as counts of steps, ``(storages,)``."""
    found: Bools = (step.storages.category == "optimizer_state") & (step.storages.shape != "")
    return found
