"""The pinned host memory that optimizer state takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.policies.optimizer.recognise import recognise_updates
from memprof.policies.optimizer.transform import state_of
from memprof.replay.rounding import rounded_when_pinned
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.optimizer.policy import OptimizerPolicy


def host_bytes(step: Step, policy: OptimizerPolicy) -> int:
    """Returns the pinned bytes of the state that a policy keeps in host memory.

    Args:
        step: The step before the policy.
        policy: The policy; nothing else of it matters.

    Raises:
        PolicyError: The step has no updates.
    """
    state = [storage for update in recognise_updates(step).updates for storage in state_of(step, update)]
    return int(rounded_when_pinned(step.storages.requested_bytes[np.array(state, dtype=np.int64)]).sum())
