"""The snapshot of a virtual device's allocator, in torch's form."""

from __future__ import annotations

from memprof.replay.allocator.model import CachingAllocator
from memprof.replay.allocator.rules import Settings
from memprof.virtual.device.statistics import memory_snapshot

MIB = 1 << 20


def test_an_expandable_segment_with_a_hole_is_reported_in_parts() -> None:
    """As by torch, which reports one segment for each contiguous range of mapped memory."""
    allocator = CachingAllocator(Settings(expandable_segments=True, capacity_bytes=100 * MIB))
    first, middle, _last = (allocator.allocate(20 * MIB) for _ in range(3))
    assert first is not None
    assert middle is not None
    (whole,) = memory_snapshot(allocator)["segments"]
    assert whole["total_size"] == 60 * MIB
    allocator.request_free(middle)
    allocator.complete_free(middle)
    assert allocator.allocate(60 * MIB) is not None  # with the middle's pages, which are unmapped for it
    parts = memory_snapshot(allocator)["segments"]
    assert [(one["address"] - first.address, one["total_size"]) for one in parts] == [
        (0, 20 * MIB),
        (40 * MIB, 80 * MIB),
    ]
    for one in parts:
        assert sum(block["size"] for block in one["blocks"]) == one["total_size"]
    assert allocator.allocate(40 * MIB) is None
    assert (allocator.log[-1].action, allocator.log[-1].address) == ("oom", 0)  # nothing is left of the device


def test_a_failed_request_logs_what_is_free() -> None:
    """Where torch's history has the bytes of the device that are free."""
    allocator = CachingAllocator(Settings(capacity_bytes=100 * MIB))
    assert allocator.allocate(60 * MIB) is not None
    assert allocator.allocate(60 * MIB) is None
    assert allocator.log[-1].address == allocator.free_on_device == 40 * MIB
