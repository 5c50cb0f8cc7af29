"""The pinned host memory that copies of moved tensors take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memprof.policies.swap.predicted_moves import parameters_to_move, state_to_move
from memprof.policies.swap.records import find_records
from memprof.replay.rounding import pinned_peak, rounded_when_pinned
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.swap.policy import Swap


def host_bytes(step: Step, policy: Swap) -> int:
    """Returns the pinned bytes that a policy's copies take at most.

    Raises:
        PolicyError: The policy does not fit the step.
    """
    sizes = step.storages.requested_bytes
    if policy.what == "optimizer":
        return int(rounded_when_pinned(sizes[state_to_move(step, policy)], step.allocator_settings).sum())
    if policy.what == "parameters":
        return int(rounded_when_pinned(sizes[parameters_to_move(step, policy)[0]], step.allocator_settings).sum())
    records = find_records(step, policy.modules, policy.minimum_bytes)
    return pinned_peak(sizes[records.storage], records.packed, records.released, step.allocator_settings)
