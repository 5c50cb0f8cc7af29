"""The error of a full device, for jobs that catch it and continue with less."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from memprof.recorder.dry.device.ordinals import ORDINALS
from memprof.replay.allocator.blocks import ALLOCATED
from memprof.replay.allocator.model import CachingAllocator
from memprof.replay.allocator.rules import rounded_request, segment_size

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def out_of_memory(
    allocator: CachingAllocator,
    requested: int,
    context_bytes: int,
    observers: Iterable[Callable[[int, int, int, int], None]],
) -> torch.OutOfMemoryError:
    """Reports a failed request to the job's observers and returns the error that torch raises for it.

    Its text follows c10/cuda/CUDACachingAllocator.cpp: libraries recognize it by its beginning.

    Args:
        allocator: The device's allocator, after its cache was released.
        requested: Bytes of the tensor.
        context_bytes: Memory of the device outside the allocator.
        observers: The job's observers.
    """
    settings = allocator.settings
    asked = segment_size(rounded_request(requested, settings.divisions))
    capacity = settings.capacity_bytes
    assert capacity is not None  # an unlimited device is never full
    total, reserved, free = capacity + context_bytes, allocator.reserved, allocator.free_on_device
    allocated = sum(
        block.size for segment in allocator.segments.values() for block in segment.blocks() if block.state == ALLOCATED
    )
    used = context_bytes + reserved
    allowed = "" if settings.limit_bytes is None else f"{_size(settings.limit_bytes)} allowed; "
    for observe in observers:
        observe(ORDINALS.index, asked, total, free)
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {_size(asked)}. GPU {ORDINALS.index} has a total "
        f"capacity of {_size(total)} of which {_size(free)} is free. Including non-PyTorch memory, this process has "
        f"{_size(used)} memory in use. {allowed}Of the allocated memory {_size(allocated)} is allocated by PyTorch, "
        f"and {_size(reserved - allocated)} is reserved by PyTorch but unallocated. If reserved but unallocated memory "
        "is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation "
        "for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-"
        "pytorch-alloc-conf)"
    )


def _size(size: int) -> str:
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"
