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
