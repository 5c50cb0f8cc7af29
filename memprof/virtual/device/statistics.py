"""The device of a dry run in torch's form: counters, snapshots, and the error when it is full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

import torch

from memprof.replay.allocator.blocks import ALLOCATED, UNMAPPED, Block, Segment
from memprof.replay.allocator.model import CachingAllocator
from memprof.replay.allocator.rules import rounded_request, segment_size
from memprof.virtual.device.current import ORDINALS

POOLS = ("small_pool", "large_pool", "all")
#: Counters that change with every block, and the names under which torch reports them.
_BLOCKS = {
    "number": ("allocation", "active"),
    "size": ("allocated_bytes", "active_bytes"),
    "requested": ("requested_bytes",),
}
_SEGMENTS = {"number": ("segment",), "size": ("reserved_bytes",)}
_UNCOUNTED = ("oversize_allocations", "oversize_segments")
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class Counter:
    """One number of ``torch.cuda.memory_stats``.

    Attributes:
        current: Its value now.
        peak: Its maximum since the last reset.
        allocated: Sum of all increases since the last reset.
        freed: Sum of all decreases since the last reset.
    """

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, change: int) -> None:
        """Adds to the current value."""
        self.current += change
        if change > 0:
            self.allocated += change
            self.peak = max(self.peak, self.current)
        else:
            self.freed -= change

    def as_dict(self) -> dict[str, int]:
        """Returns the values by name."""
        return {"current": self.current, "peak": self.peak, "allocated": self.allocated, "freed": self.freed}


class Statistics:
    """The counters of an allocator by kind and pool."""

    def __init__(self, allocator: CachingAllocator) -> None:
        """Starts with nothing allocated."""
        self._allocator = allocator
        self._blocks = {(kind, pool): Counter() for kind in _BLOCKS for pool in POOLS}
        self._segments = {(kind, pool): Counter() for kind in _SEGMENTS for pool in POOLS}
        self._events = 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all blocks in use."""
        return self._blocks["size", "all"].current

    def change(self, block: Block, sign: int) -> None:
        """Counts a block taken (1) or given back (-1)."""
        pool = POOLS[not block.segment.pool.is_small]
        for kind, change in (("number", sign), ("size", sign * block.size), ("requested", sign * block.requested)):
            self._blocks[kind, pool].add(change)
            self._blocks[kind, "all"].add(change)
        self.count_segments()

    def count_segments(self) -> None:
        """Counts the segments anew where any was reserved or released."""
        if len(self._allocator.log) == self._events:
            return
        self._events = len(self._allocator.log)
        now = dict.fromkeys(self._segments, 0)
        for segment in self._allocator.segments.values():
            size = sum(block.size for block in segment.blocks() if block.state != UNMAPPED)
            for pool in (POOLS[not segment.pool.is_small], "all"):
                now["number", pool] += 1
                now["size", pool] += size
        for key, value in now.items():
            self._segments[key].add(value - self._segments[key].current)

    def reset_peak(self) -> None:
        """Sets the peaks to the current values."""
        self.count_segments()
        for counter in self._counters():
            counter.peak = counter.current

    def reset_accumulated(self) -> None:
        """Sets the sums of increases and decreases to zero."""
        self.count_segments()
        for counter in self._counters():
            counter.allocated = counter.freed = 0

    def as_dict(self) -> dict[str, Any]:
        """Returns the counters as ``torch._C._cuda_memoryStats`` does."""
        self.count_segments()
        log = self._allocator.log
        split = self._allocator.settings.max_split_size_bytes
        found: dict[str, Any] = {
            "num_alloc_retries": self._allocator.retries,
            "num_ooms": sum(event.action == "oom" for event in log),
            "num_sync_all_streams": 0,
            "num_device_alloc": sum(event.action in ("segment_alloc", "segment_map") for event in log),
            "num_device_free": sum(event.action in ("segment_free", "segment_unmap") for event in log),
            "max_split_size": -1 if split is None else split,
        }
        for names, counters in ((_BLOCKS, self._blocks), (_SEGMENTS, self._segments)):
            for kind, reported in names.items():
                values = {pool: counters[kind, pool].as_dict() for pool in ("all", "small_pool", "large_pool")}
                found |= dict.fromkeys(reported, values)
        found |= self._inactive()
        return found | {name: Counter().as_dict() for name in _UNCOUNTED}

    def _counters(self) -> Iterator[Counter]:
        yield from self._blocks.values()
        yield from self._segments.values()

    def _inactive(self) -> dict[str, Any]:
        """Returns the free parts of segments that are in use: current values alone."""
        counts = {(kind, pool): Counter() for kind in ("inactive_split", "inactive_split_bytes") for pool in POOLS}
        for segment in self._allocator.segments.values():
            blocks = list(segment.blocks())
            for block in blocks if len(blocks) > 1 else ():
                if block.state not in (ALLOCATED, UNMAPPED):
                    for pool in (POOLS[not segment.pool.is_small], "all"):
                        counts["inactive_split", pool].add(1)
                        counts["inactive_split_bytes", pool].add(block.size)
        return {
            kind: {pool: counts[kind, pool].as_dict() for pool in POOLS}
            for kind in ("inactive_split", "inactive_split_bytes")
        }


def memory_snapshot(allocator: CachingAllocator) -> dict[str, Any]:
    """Returns segments and blocks as ``torch._C._cuda_memorySnapshot`` does; without stacks and history."""
    settings = allocator.settings
    segments = sorted(allocator.segments.values(), key=lambda one: one.address)
    return {
        "segments": [_range(one, blocks) for one in segments for blocks in _mapped(one)],
        "device_traces": [[]],
        "allocator_settings": {
            "expandable_segments": settings.expandable_segments,
            "max_split_size": settings.max_split_size_bytes or -1,
            "garbage_collection_threshold": settings.garbage_collection_threshold or 0.0,
        },
        "external_annotations": [],
    }


def _mapped(segment: Segment) -> Iterator[list[Block]]:
    """Yields the blocks of each contiguous range of mapped memory, which torch reports as a segment of its own."""
    for is_unmapped, blocks in groupby(segment.blocks(), key=lambda block: block.state == UNMAPPED):
        if not is_unmapped:
            yield list(blocks)


def _range(segment: Segment, blocks: list[Block]) -> dict[str, Any]:
    used = [block for block in blocks if block.state == ALLOCATED]
    return {
        "device": 0,
        "address": blocks[0].address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": sum(block.size for block in used),
        "active_size": sum(block.size for block in used),
        "requested_size": sum(block.requested for block in used),
        "stream": 0,
        "segment_type": "small" if segment.pool.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": segment.is_expandable,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested if block.state == ALLOCATED else 0,
                "state": "active_allocated" if block.state == ALLOCATED else "inactive",
                "frames": [],
            }
            for block in blocks
        ],
    }


def out_of_memory(
    allocator: CachingAllocator,
    requested: int,
    context_bytes: int,
    observers: Iterable[Callable[[int, int, int, int], None]],
) -> torch.OutOfMemoryError:
    """Reports a failed request to the job's observers and returns the error that torch raises for it.

    Its text follows c10/cuda/CUDACachingAllocator.cpp: libraries recognize it by its beginning.
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
