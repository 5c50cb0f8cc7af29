"""What is reserved and not used at a moment: holes, what pins their segments, and what other settings would give."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.replay.allocator.blocks import FREE, UNMAPPED, Segment
from memprof.replay.allocator.events import ALLOCATE, Replay, Requests, replay
from memprof.replay.allocator.model import CachingAllocator
from memprof.replay.allocator.rules import DIVISION_SIZES, MIB, Settings


@dataclass(frozen=True)
class SegmentUse:
    """One segment at a moment.

    Attributes:
        address: First byte.
        size: Bytes reserved for it.
        is_small: Whether it serves small requests.
        is_expandable: Whether it grows in place.
        free_bytes: Bytes of its free blocks.
        largest_hole: Bytes of the largest of them.
        holes: How many there are.
        blocks: Blocks given out.
        pins: Allocations in it, largest first: while one of them lives, the segment cannot be given back.
    """

    address: int
    size: int
    is_small: bool
    is_expandable: bool
    free_bytes: int
    largest_hole: int
    holes: int
    blocks: int
    pins: tuple[int, ...]


@dataclass(frozen=True)
class Fragmentation:
    """What is reserved at a moment, and what of it is not used.

    Attributes:
        reserved: Bytes of all segments.
        allocated: Bytes of the blocks given out.
        requested: Bytes asked for by those.
        largest_free: Bytes of the largest free block: the largest request that needs no new segment.
        idle_bytes: Free bytes in segments that are wholly free: ``torch.cuda.empty_cache()`` would give them back.
        pinned_bytes: Free bytes beside blocks in use: nobody can give them back.
        segments: The segments, most free bytes first.
    """

    reserved: int
    allocated: int
    requested: int
    largest_free: int
    idle_bytes: int
    pinned_bytes: int
    segments: tuple[SegmentUse, ...]


@dataclass(frozen=True)
class Outcome:
    """What some settings give for the same requests.

    Attributes:
        name: The settings as torch's variable has them, "" for none.
        settings: The settings.
        reserved_peak: Highest reserved bytes.
        allocated_peak: Highest bytes given out.
        segments: Segments taken, or times an expandable one grew.
        retries: Times the device was full and everything cached was given back.
        failed: Allocations that found the device full all the same.
    """

    name: str
    settings: Settings
    reserved_peak: int
    allocated_peak: int
    segments: int
    retries: int
    failed: int


#: What is tried beside the settings in force, as torch's variable has them.
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
    """Sums up a replay.

    Args:
        done: The replay.
        name: Its settings as torch's variable has them.
    """
    return Outcome(
        name,
        done.allocator.settings,
        reserved_peak=int(done.reserved().max(initial=0)),
        allocated_peak=int(done.allocated().max(initial=0)),
        segments=sum(one.action in ("segment_alloc", "segment_map") for one in done.segment_events()),
        retries=done.allocator.retries,
        failed=int(np.count_nonzero(done.failed())),
    )


def last_growth(done: Replay) -> int:
    """Returns the event at which the reserved bytes first stood at their highest, 0 where nothing was reserved."""
    reserved = done.reserved()
    return int(reserved.argmax()) if len(reserved) else 0


def fragmentation_at(requests: Requests, settings: Settings, event: int) -> Fragmentation:
    """Returns what is reserved and used just after an event."""
    return describe(replay(requests, settings, until=event + 1).allocator)


def size_at(requests: Requests, event: int) -> int:
    """Returns the bytes asked for at an event, 0 where it is no allocation."""
    return int(requests.size[requests.allocation[event]]) if requests.kind[event] == ALLOCATE else 0


def describe(allocator: CachingAllocator) -> Fragmentation:
    """Returns what an allocator has reserved and what of it is used."""
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
