"""Allocation rounding by device."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from memprof.trace.schema import Bools, Ints, Texts

#: CUDA's allocator rounds to multiples of this (c10/cuda/CUDACachingAllocator, kMinBlockSize). The CPU's does not
#: round.
CUDA_ROUNDING_BYTES = 512

Size = TypeVar("Size", int, Ints)


def rounded_on_cuda(sizes: Size) -> Size:
    """Rounds sizes as CUDA's allocator does."""
    return -(-sizes // CUDA_ROUNDING_BYTES) * CUDA_ROUNDING_BYTES


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
