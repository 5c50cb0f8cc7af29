"""Reads figures from recordings and predictions."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.policies.allocator.policy import parse_options
from memprof.policies.plan.plan import Plan
from memprof.replay.allocator.rules import Settings, settings_from_options
from memprof.replay.allocator.steps import reserved_by_op
from memprof.trace.manifest import Manifest
from memprof.trace.step import Step
from tests.devices import device_peak

#: The counters that are compared, as the jobs print them and as the table of memory has them.
COUNTERS = ("allocated_bytes", "active_bytes", "reserved_bytes")


@dataclass(frozen=True)
class Peaks:
    """Highest counts of a step; None where they are not known.

    Attributes:
        allocated_bytes: Of the recorded counters.
        active_bytes: The same.
        reserved_bytes: The same.
        replayed_bytes: Of the allocations and frees of the device's storages.
    """

    allocated_bytes: int | None
    active_bytes: int | None
    reserved_bytes: int | None
    replayed_bytes: int


def peaks_of(step: Step, device: str) -> Peaks:
    """Returns the peaks of a recorded step on a device."""
    rows = step.memory.take(step.memory.device == device)
    highest = {}
    for counter in COUNTERS:
        values = getattr(rows, counter)
        highest[counter] = int(values.max()) if len(values) and values.max() >= 0 else None
    return Peaks(**highest, replayed_bytes=device_peak(step, device))


def allocator_settings(manifest: Manifest) -> Settings:
    """Returns what the recorded allocator was told."""
    return settings_from_options(
        parse_options(manifest.machine.allocator_settings), capacity_bytes=manifest.machine.capacity_bytes or None
    )


def predicted_reserved(step: Step, plan: Plan, manifest: Manifest) -> int:
    """Returns the reserved bytes of a predicted step, through the model of the caching allocator."""
    options = parse_options(manifest.machine.allocator_settings)
    for policy in plan.policies:
        if policy.name == "allocator":
            options |= policy.options()
    return int(reserved_by_op(step, settings_from_options(options)).max(initial=0))
