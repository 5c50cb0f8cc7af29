"""Allocation rounding by device, and bounds of what CUDA's allocator adds to large blocks.

In large segments the allocator splits a free block only where more than 1 MiB would remain
(c10/cuda/CUDACachingAllocator.cpp, ``should_split``): otherwise the request gets the whole block. Which free block
serves it depends on everything before, so a plan changes these bytes in ways that its sizes alone do not determine.
"""

from __future__ import annotations

import re
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


def rounded_when_pinned(sizes: Ints, settings: str = "") -> Ints:
    """Rounds sizes up to powers of two, as torch's allocator of pinned memory does (ATen/core/CachingHostAllocator.h).

    Args:
        sizes: Bytes requested, shape ``(requests,)``.
        settings: ``PYTORCH_ALLOC_CONF``, whose ``pinned_max_`` options limit what is rounded.
    """
    powers: Ints = np.left_shift(1, np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64))
    return np.where((sizes > 0) & (sizes <= min(pinned_limits(settings))), powers, sizes)


def pinned_peak(sizes: Ints, first: Ints, last: Ints, settings: str = "") -> int:
    """Returns the pinned bytes that torch's allocator takes: what is freed serves requests of the same power of two.

    Blocks above ``pinned_max_cached_size_mb`` are returned when they are freed.

    Args:
        sizes: Bytes of each request, shape ``(requests,)``.
        first: Moment of each request.
        last: Moment after which it is freed.
        settings: ``PYTORCH_ALLOC_CONF``.
    """
    blocks, powers = rounded_when_pinned(sizes, settings), rounded_when_pinned(sizes)
    _, most_cached = pinned_limits(settings)
    is_cached = blocks <= most_cached
    own = np.where(is_cached, blocks, 0)
    total = 0
    for power in np.unique(powers[is_cached]).tolist():
        rows = is_cached & (powers == power)
        # Sizes differ only where they are not rounded; then the largest ones are what is kept, at most.
        largest = np.sort(own[rows])[::-1]
        total += int(largest[: _most_at_once(first[rows], last[rows], np.ones(len(largest), dtype=np.int64))].sum())
    return total + _most_at_once(first[~is_cached], last[~is_cached], blocks[~is_cached])


def _most_at_once(first: Ints, last: Ints, sizes: Ints) -> int:
    """Returns the highest sum of sizes at a moment."""
    moments, change = np.concatenate([first, last + 1]), np.concatenate([sizes, -sizes])
    order = np.lexsort((change, moments))  # what is freed at a moment serves what is requested then
    return int(np.cumsum(change[order]).max(initial=0))


def pinned_limits(settings: str) -> tuple[int, int]:
    """Returns the largest request of pinned memory that is rounded, and the largest block that is kept when freed."""
    given = dict(re.findall(r"pinned_max_(round_threshold|cached_size)_mb:(\d+)", settings))
    most_rounded, most_cached = (int(given.get(name, 1 << 40)) << 20 for name in ("round_threshold", "cached_size"))
    return most_rounded, most_cached


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
