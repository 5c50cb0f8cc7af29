"""Allocation rounding by device, and bounds of what CUDA's allocator adds to large blocks.

In large segments the allocator splits a free block only where more than 1 MiB would remain
(c10/cuda/CUDACachingAllocator.cpp, ``should_split``): otherwise the request gets the whole block. Which free block
serves it depends on everything before, so a plan changes these bytes in ways that its sizes alone do not determine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from memprof.replay.allocator.rules import ROUNDING_BYTES, SMALL_REQUEST_BYTES
from memprof.replay.live import FOUND, live_bytes, sum_during
from memprof.trace.schema import Bools, Ints, Storages, Texts
from memprof.trace.step import Step

Size = TypeVar("Size", int, Ints)
#: Standard deviations between the expected sum over live blocks and its upper bound.
_DEVIATIONS = 2.0


def rounded_on_cuda(sizes: Size) -> Size:
    """Rounds sizes as CUDA's allocator does; the CPU's does not round."""
    return -(-sizes // ROUNDING_BYTES) * ROUNDING_BYTES


def rounded(sizes: Ints, devices: Texts) -> Ints:
    """Rounds sizes as the allocator of each device does.

    Args:
        sizes: Bytes requested.
        devices: Device of each, such as ``cpu`` or ``cuda:0``.
    """
    on_cuda: Bools = np.zeros(len(sizes), dtype=np.bool_)
    for device in set(devices.tolist()):
        if str(device).startswith("cuda"):
            on_cuda |= devices == device
    return np.where(on_cuda, rounded_on_cuda(sizes), sizes)


def rounded_when_pinned(sizes: Ints) -> Ints:
    """Rounds sizes up to powers of two, as torch's allocator of pinned memory does (ATen/core/CachingHostAllocator.h).

    Args:
        sizes: Bytes requested, shape ``(requests,)``.
    """
    powers: Ints = np.left_shift(1, np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64))
    return np.where(sizes > 0, powers, 0)


def pinned_peak(sizes: Ints, first: Ints, last: Ints) -> int:
    """Returns the pinned bytes that torch's allocator ends up with: what is freed serves the same power of two only.

    Args:
        sizes: Bytes of each request, shape ``(requests,)``.
        first: Moment of each request.
        last: Moment after which it is freed.
    """
    powers = rounded_when_pinned(sizes)
    total = 0
    for power in np.unique(powers).tolist():
        own = powers == power
        moments = np.concatenate([first[own], last[own] + 1])
        change = np.repeat([1, -1], int(own.sum()))
        order = np.lexsort((change, moments))  # what is freed at a moment serves what is requested then
        total += power * int(np.cumsum(change[order]).max(initial=0))
    return total


@dataclass(frozen=True)
class Unsplit:
    """By how much a job's large blocks exceed their requests.

    Attributes:
        mean_bytes: Mean over the large blocks of a step.
        deviation_bytes: Standard deviation over them.
    """

    mean_bytes: float
    deviation_bytes: float

    @staticmethod
    def of(step: Step) -> Unsplit:
        """Returns the figures of a recorded step; zeros where it has no large blocks, as on the CPU."""
        extra = _extra_bytes(step.storages.take(_is_large(step.storages)))
        return Unsplit(float(extra.mean()), float(extra.std())) if len(extra) else Unsplit(0.0, 0.0)

    def bounds_of_peak(self, step: Step) -> tuple[int, int]:
        """Returns the lower and the upper bound of a predicted step's peak, in bytes.

        Args:
            step: The predicted step. The lower bound assumes that its large blocks have the sizes of their requests.
        """
        large = step.storages.take(_is_large(step.storages))
        ops, during = len(step.ops), live_bytes(step).during
        without = during - sum_during(large, ops, _extra_bytes(large))
        count = sum_during(large, ops, np.ones(len(large), dtype=np.int64))
        most = without + count * self.mean_bytes + _DEVIATIONS * np.sqrt(count) * self.deviation_bytes
        return int(without.max(initial=0)), int(np.ceil(most.max(initial=0)))


def _is_large(storages: Storages) -> Bools:
    """Returns which storages are allocated anew in every step, in large segments of a device."""
    is_large = (storages.requested_bytes > SMALL_REQUEST_BYTES) & (storages.allocated_bytes > 0)
    is_large &= ~np.isin(storages.device, ("cpu", "", "meta")) & ~np.isin(storages.category, FOUND)
    return is_large


def _extra_bytes(storages: Storages) -> Ints:
    extra: Ints = storages.allocated_bytes - rounded_on_cuda(storages.requested_bytes)
    return np.maximum(extra, 0)
