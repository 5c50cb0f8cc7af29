"""Rewrites a step for other allocator options: block sizes and reserved bytes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from memprof.replay.allocator.rules import Settings, rounded_request, settings_from_options
from memprof.replay.allocator.steps import device_of, reserved_by_op
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE, Ints, Memory
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.allocator.policy import Allocator


def transform(step: Step, policy: Allocator) -> Step:
    """Returns the step with the block sizes and reserved bytes under the options; on CPU, the step unchanged.

    The step's requests are replayed through the model of the caching allocator. ``roundup_power2_divisions`` enlarges
    blocks, and ``expandable_segments`` splits all of them to the size of their request: torch's counters of allocated
    bytes show both. The other options change only reserved bytes, which are written to the step's counters.
    """
    device = device_of(step)
    if not device.startswith("cuda"):
        return step
    settings = settings_from_options(policy.options())
    if policy.roundup_power2_divisions > 1 or policy.expandable_segments:
        step = _with_rounded_sizes(step, device, settings)
    return dataclasses.replace(step, memory=_counters(step, device, reserved_by_op(step, settings)))


def _counters(step: Step, device: str, reserved: Ints) -> Memory:
    """Writes one memory sample per operator for the device, and one for bytes held elsewhere, if any."""
    on_device = _device_bytes(step, device)
    elsewhere = live_bytes(step).during - on_device
    ops = np.arange(len(step.ops))
    also = np.flatnonzero(elsewhere)
    rows = np.concatenate([ops, also])
    order = np.argsort(rows, kind="stable")
    allocated = np.concatenate([on_device, elsewhere[also]])
    return Memory.of(
        op_id=rows,
        time_us=step.ops.start_us[rows],
        device=np.repeat(np.array([device, "cpu"], dtype=object), [len(ops), len(also)]),
        allocated_bytes=allocated,
        active_bytes=allocated,
        reserved_bytes=np.concatenate([reserved, np.full(len(also), NONE)]),
        host_rss_bytes=np.full(len(rows), NONE),
    ).take(order)


def _with_rounded_sizes(step: Step, device: str, settings: Settings) -> Step:
    """Returns the step with the size that the settings give every block of a device."""
    storages = step.storages
    is_own = (storages.device == device) & (storages.allocated_bytes > 0) & (storages.requested_bytes > 0)
    distinct, place = np.unique(storages.requested_bytes[is_own], return_inverse=True)
    sizes = np.array([rounded_request(int(size), settings.divisions) for size in distinct], dtype=np.int64)
    allocated = storages.allocated_bytes.copy()
    least = 0 if settings.expandable_segments else allocated[is_own]
    allocated[is_own] = np.maximum(least, sizes[place])
    return dataclasses.replace(step, storages=storages.replace(allocated_bytes=allocated))


def _device_bytes(step: Step, device: str) -> Ints:
    storages = step.storages
    elsewhere = storages.replace(allocated_bytes=np.where(storages.device == device, storages.allocated_bytes, 0))
    return live_bytes(dataclasses.replace(step, storages=elsewhere)).during
