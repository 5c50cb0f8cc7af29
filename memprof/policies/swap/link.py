"""How fast what is swapped travels, and how much longer a step takes for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memprof.policies.swap.policy import DEFAULT_GBPS
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.swap.policy import Swap

#: What Python and torch need for an operator on the processor when a device computes; not measured: the usual figure
#: for eager PyTorch is 5 to 10.
LAUNCH_US = 8.0


@dataclass(frozen=True)
class Link:
    """Bytes a microsecond, out and back."""

    out_bytes_per_us: float
    in_bytes_per_us: float


def link_of(step: Step, policy: Swap) -> Link:
    """Returns the speeds that the policy sets, else those measured where the step ran, else usual ones."""
    if policy.gbps:
        return Link(policy.gbps * 1e3, policy.gbps * 1e3)
    usual = DEFAULT_GBPS[policy.to] * 1e3
    if policy.to == "disk":
        return Link(usual, usual)
    return Link(step.to_host_bytes_per_us or usual, step.from_host_bytes_per_us or usual)


def longer_us(step: Step, policy: Swap, work_us: float, waits_us: float) -> float:
    """Returns how much longer a step takes.

    The processor's own work counts in full where it computes as well. Beside a device that computes, it counts only
    where the processor is not done before the device is.

    Args:
        step: The step as it is.
        policy: The settings.
        work_us: Time of the processor for packing, queueing and views.
        waits_us: Time for which the computation waits for copies.
    """
    if policy.to == "disk":
        return work_us + waits_us
    processor_us = len(step.ops) * LAUNCH_US + work_us
    return waits_us + max(0.0, processor_us - max(step.duration_us, len(step.ops) * LAUNCH_US) - waits_us)
