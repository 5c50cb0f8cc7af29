"""Reserved but unused memory: holes, the allocations that pin their segments, and the effect of other settings."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memprof.json_values import LEFT_OUT, key
from memprof.replay.allocator.blocks import FREE, UNMAPPED, Segment
from memprof.replay.allocator.events import ALLOCATE, Replay, Requests, replay
from memprof.replay.allocator.model import CachingAllocator
from memprof.replay.allocator.rules import DIVISION_SIZES, MIB, Settings


@dataclass(frozen=True)
class SegmentUse:
    """One segment at a point in time.

    Attributes:
        address: First byte.
        size: Bytes reserved for it.
        is_small: Whether it serves small requests.
        is_expandable: Whether it grows in place.
        free_bytes: Bytes of its free blocks.
        largest_hole: Bytes of the largest of them.
        holes: Number of free blocks.
        blocks: Number of allocated blocks.
        pins: Its allocations, largest first: while one of them is live, the segment cannot be released.
    """

    address: int
    size: int = field(metadata=key("size_bytes"))
    is_small: bool = field(metadata=key("type", lambda is_small: "small" if is_small else "large"))
    is_expandable: bool
    free_bytes: int
    largest_hole: int = field(metadata=key("largest_hole_bytes"))
    holes: int
    blocks: int
    pins: tuple[int, ...] = field(metadata=LEFT_OUT)


@dataclass(frozen=True)
class Fragmentation:
    """Reserved memory at a point in time, and its unused part.

    Attributes:
        reserved: Bytes of all segments.
        allocated: Bytes of the allocated blocks.
        requested: Bytes requested for those.
        largest_free: Bytes of the largest free block: the largest request that needs no new segment.
        idle_bytes: Free bytes in wholly free segments: ``torch.cuda.empty_cache()`` would release them.
        pinned_bytes: Free bytes in segments with allocated blocks: these cannot be released.
        segments: The segments, most free bytes first.
    """

    reserved: int = field(metadata=key("reserved_bytes"))
    allocated: int = field(metadata=key("allocated_bytes"))
    requested: int = field(metadata=key("requested_bytes"))
    largest_free: int = field(metadata=key("largest_free_block_bytes"))
    idle_bytes: int = field(metadata=key("idle_segments_bytes"))
    pinned_bytes: int = field(metadata=key("holes_bytes"))
    segments: tuple[SegmentUse, ...] = field(metadata=LEFT_OUT)


@dataclass(frozen=True)
class Outcome:
    """Result of some settings for the same requests.

    Attributes:
        name: The settings in the syntax of torch's variable, "" for none.
        settings: The settings.
        reserved_peak: Peak reserved bytes.
        allocated_peak: Peak allocated bytes.
        segments: Number of segments reserved, or of growths of an expandable one.
        retries: Times the device was full and the cache was released.
        failed: Allocations that failed nevertheless.
    """

    name: str = field(metadata=key("settings"))
    settings: Settings = field(metadata=LEFT_OUT)
    reserved_peak: int = field(metadata=key("reserved_peak_bytes"))
    allocated_peak: int = field(metadata=key("allocated_peak_bytes"))
    segments: int = field(metadata=key("segments_taken"))
    retries: int
    failed: int = field(metadata=key("failed_allocations"))


#: Settings tried in addition to the current ones, in the syntax of torch's variable.
ALTERNATIVES: tuple[tuple[str, Settings], ...] = (
    ("", Settings()),
    ("expandable_segments:True", Settings(expandable_segments=True)),
    ("max_split_size_mb:64", Settings(max_split_size_bytes=64 * MIB)),
    ("max_split_size_mb:256", Settings(max_split_size_bytes=256 * MIB)),
    ("max_split_size_mb:512", Settings(max_split_size_bytes=512 * MIB)),
    ("roundup_power2_divisions:4", Settings(divisions=(4,) * DIVISION_SIZES)),
    ("roundup_power2_divisions:16", Settings(divisions=(16,) * DIVISION_SIZES)),
)


def outcome(done: Replay, name: str) -> Outcome:
    """Summarizes a replay."""
    return Outcome(
        name,
        done.allocator.settings,
        reserved_peak=int(done.reserved().max(initial=0)),
        allocated_peak=int(done.allocated().max(initial=0)),
        segments=sum(one.action in ("segment_alloc", "segment_map") for one in done.segment_events),
        retries=done.allocator.retries,
        failed=int(np.count_nonzero(done.failed())),
    )


def last_growth(done: Replay) -> int:
    """Returns the event at which the reserved bytes first peaked, 0 where nothing was reserved."""
    reserved = done.reserved()
    return int(reserved.argmax()) if len(reserved) else 0


def fragmentation_at(requests: Requests, settings: Settings, event: int) -> Fragmentation:
    """Returns reserved and used memory right after an event."""
    return describe(replay(requests, settings, until=event + 1).allocator)


def size_at(requests: Requests, event: int) -> int:
    """Returns the bytes requested by an event, 0 if it is not an allocation."""
    return int(requests.size[requests.allocation[event]]) if requests.kind[event] == ALLOCATE else 0


def describe(allocator: CachingAllocator) -> Fragmentation:
    """Returns an allocator's reserved and used memory."""
    uses = [_use(segment) for segment in allocator.segments.values()]
    blocks = [
        block
        for segment in allocator.segments.values()
        for block in segment.blocks()
        if block.state not in (FREE, UNMAPPED)
    ]
    return Fragmentation(
        reserved=allocator.reserved,
        allocated=sum(block.size for block in blocks),
        requested=sum(block.requested for block in blocks),
        largest_free=allocator.largest_free(),
        idle_bytes=sum(use.free_bytes for use in uses if not use.blocks),
        pinned_bytes=sum(use.free_bytes for use in uses if use.blocks),
        segments=tuple(sorted(uses, key=lambda use: (-use.free_bytes, use.address))),
    )


def _use(segment: Segment) -> SegmentUse:
    mapped = [block for block in segment.blocks() if block.state != UNMAPPED]
    holes = [block.size for block in mapped if block.state == FREE]
    given = sorted((block for block in mapped if block.state != FREE), key=lambda block: (-block.size, block.address))
    return SegmentUse(
        address=segment.address,
        size=sum(block.size for block in mapped),
        is_small=segment.pool.is_small,
        is_expandable=segment.is_expandable,
        free_bytes=sum(holes),
        largest_hole=max(holes, default=0),
        holes=len(holes),
        blocks=len(given),
        pins=tuple(block.allocation for block in given),
    )
