"""Computes the bandwidth of swapping, and how much longer a step takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memprof.policies.swap.policy import DEFAULT_GBPS
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.swap.policy import Swap

#: Processor time to launch an operator from Python and torch when a device computes; not measured: eager PyTorch
#: typically takes 5 to 10.
LAUNCH_US = 8.0


@dataclass(frozen=True)
class Link:
    """Bytes per microsecond, out and back."""

    out_bytes_per_us: float
    in_bytes_per_us: float


def link_of(step: Step, policy: Swap) -> Link:
    """Returns the speeds set by the policy, else those measured on the recording machine, else typical ones."""
    if policy.gbps:
        return Link(policy.gbps * 1e3, policy.gbps * 1e3)
    usual = DEFAULT_GBPS[policy.to] * 1e3
    if policy.to == "disk":
        return Link(usual, usual)
    return Link(step.to_host_bytes_per_us or usual, step.from_host_bytes_per_us or usual)


def longer_us(step: Step, policy: Swap, work_us: float, waits_us: float) -> float:
    """Returns how much longer a step takes.

    The processor's own work counts in full if it also computes. If a device computes, it counts only where the
    processor finishes after the device.

    Args:
        step: The original step.
        policy: The settings.
        work_us: Processor time for packing, queueing and views.
        waits_us: Time the computation waits for copies.
    """
    if policy.to == "disk":
        return work_us + waits_us
    processor_us = len(step.ops) * LAUNCH_US + work_us
    return waits_us + max(0.0, processor_us - max(step.duration_us, len(step.ops) * LAUNCH_US) - waits_us)
