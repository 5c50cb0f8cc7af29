"""Leaves a step as it is: the allocator's options change reserved bytes, not allocated ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.allocator.policy import Allocator


def transform_allocator(step: Step, policy: Allocator) -> Step:
    """Returns the step.

    What a tensor takes is rounded the same way under every option but ``roundup_power2_divisions``, whose rounding
    torch's counters of allocated bytes show too. That, and reserved bytes, need the model of the caching allocator,
    which is not written yet; so the policy's source is a rule, and ``describe`` says so.
    """
    return step
