"""The CUDA caching allocator: gives out blocks as torch's does, and logs the segments it takes and returns.

Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.0 to 2.13, modelled from its behaviour. Left out: what does not
change which block is given, such as statistics, events of the driver and sharing between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from memprof.replay.allocator.blocks import ALLOCATED, FREE, PENDING, UNMAPPED, Block, Pool, Segment
from memprof.replay.allocator.expandable import find_growth, map_pages
from memprof.replay.allocator.release import collect_garbage, release_cached, release_oversized
from memprof.replay.allocator.rules import (
    ASSUMED_DEVICE_BYTES,
    NON_SPLIT_ROUNDING_BYTES,
    ROUNDING_BYTES,
    SMALL_REQUEST_BYTES,
    Settings,
    TieBreak,
    rounded_request,
    segment_size,
)

#: Where a made-up address space begins, and what its segments are aligned to.
_FIRST_ADDRESS = 1 << 40
_ALIGNMENT = 2 << 20


class SegmentEvent(NamedTuple):
    """One thing that happened to a segment, by the allocator's own name for it.

    Attributes:
        event: Position of the request during which it happened.
        action: ``segment_alloc``, ``segment_free``, ``segment_map``, ``segment_unmap`` or ``oom``.
        address: First byte; 0 for ``oom``.
        size: Bytes taken or given back; for ``oom``, bytes that could not be had.
        stream: The stream.
    """

    event: int
    action: str
    address: int
    size: int
    stream: int


Addresses = Callable[[int, int], int]


def rising_addresses() -> Addresses:
    """Returns a source of addresses that hands out ever higher ones: what a driver does that never reuses any."""
    following = _FIRST_ADDRESS

    def take(size: int, stream: int) -> int:
        nonlocal following
        address = following
        following += -(-size // _ALIGNMENT) * _ALIGNMENT
        return address

    return take


class CachingAllocator:
    """The allocator of one device.

    Attributes:
        settings: What it was told.
        tie_break: Which of several free blocks of one size it takes.
        reserved: Bytes of all segments, of expandable ones those that are mapped.
        event: Position of the request in hand, for the log; whoever replays sets it.
        log: What happened to segments.
        retries: Times everything cached was given back because the device was full.
        segments: Segments by their address.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        tie_break: TieBreak = "address",
        addresses: Addresses | None = None,
    ) -> None:
        """Starts with nothing reserved.

        Args:
            settings: What it is told; torch's defaults where left out.
            tie_break: Which of several free blocks of one size it takes.
            addresses: Gives the address of a new segment of a size on a stream; rising ones where left out.
        """
        self.settings = settings or Settings()
        self.reserved = 0
        self.event = 0
        self.log: list[SegmentEvent] = []
        self.retries = 0
        self.segments: dict[int, Segment] = {}
        self.tie_break: TieBreak = tie_break
        self._addresses = addresses or rising_addresses()
        self._pools: dict[tuple[int, int, bool], Pool] = {}
        self._blocks_made = 0
        self._segments_made = 0
        self._divisions = self.settings.divisions if any(steps > 1 for steps in self.settings.divisions) else ()
        # Larger than any request: every block may be split.
        self._max_split = self.settings.max_split_size_bytes or 1 << 62
        self._collects = bool(self.settings.garbage_collection_threshold) and self.settings.limit_bytes is not None

    def allocate(self, requested: int, stream: int = 0, owner: int = 0) -> Block | None:
        """Gives out a block.

        Args:
            requested: Bytes asked for, above 0.
            stream: The stream it is for.
            owner: Number of the memory pool, 0 for the default one.

        Returns:
            The block; None where the device is full even after everything cached was given back.
        """
        divisions = self._divisions
        size = rounded_request(requested, divisions) if divisions else (requested + 511) & ~511
        is_small = size <= SMALL_REQUEST_BYTES
        pool = self._pools.get((owner, stream, is_small)) or self.pool(owner, stream, is_small=is_small)
        block = self._cached(pool, size) or self._taken(pool, size)
        if block is None:
            self.log.append(SegmentEvent(self.event, "oom", 0, size, stream))
            return None
        rest = block.size - size
        if rest >= ROUNDING_BYTES and self._is_worth_splitting(pool, size, rest):
            block = self._split(block, size, pool)
        block.state = ALLOCATED
        block.requested = requested
        return block

    def request_free(self, block: Block) -> None:
        """Takes a block back; it stays unusable until ``complete_free``."""
        block.state = PENDING

    def complete_free(self, block: Block) -> None:
        """Makes a block that was taken back free, joined with its free neighbours."""
        pool = block.segment.pool
        block.state = FREE
        previous, following = block.previous, block.next
        if previous is not None and previous.state == FREE:
            pool.remove(previous)
            self.absorb_before(block, previous)
        if following is not None and following.state == FREE:
            pool.remove(following)
            self.absorb_behind(block, following)
        pool.add(block)

    def release_cached(self) -> None:
        """Gives back every segment that is wholly free, as ``torch.cuda.empty_cache()`` and a full device do."""
        release_cached(self)

    def pool(self, owner: int, stream: int, *, is_small: bool) -> Pool:
        """Returns a pool, empty where nothing was asked of it before."""
        key = (owner, stream, is_small)
        if key not in self._pools:
            self._pools[key] = Pool(owner, stream, self.tie_break, is_small=is_small)
        return self._pools[key]

    def pools(self) -> Iterator[Pool]:
        """Walks the pools."""
        return iter(self._pools.values())

    def largest_free(self) -> int:
        """Returns the bytes of the largest free block."""
        blocks = (pool.largest() for pool in self._pools.values())
        return max((block.size for block in blocks if block is not None), default=0)

    def add_segment(self, address: int, size: int, pool: Pool, *, is_expandable: bool = False) -> Segment:
        """Registers a segment; its blocks are for the caller to make, and what is mapped of it to count."""
        segment = Segment(address, size, pool, self._segments_made, is_expandable=is_expandable)
        self._segments_made += 1
        self.segments[address] = segment
        return segment

    def make_block(self, address: int, size: int, segment: Segment, state: int = FREE) -> Block:
        """Makes a block, linked to nothing yet."""
        block = Block(address, size, segment, self._blocks_made, state)
        self._blocks_made += 1
        return block

    def take_at(self, free: Block, address: int, size: int) -> Block:
        """Gives out a certain part of a free block, whatever the allocator itself would have chosen."""
        pool = free.segment.pool
        pool.remove(free)
        if address > free.address:
            self._split(free, address - free.address, pool)
            pool.add(free.previous)  # type: ignore[arg-type]  # the front that was just cut off
            pool.remove(free)
        block = self._split(free, size, pool) if size < free.size else free
        block.state = ALLOCATED
        return block

    def absorb_before(self, block: Block, previous: Block) -> None:
        """Lets a block take the place of the one before it as well."""
        block.address = previous.address
        block.size += previous.size
        block.place_between(previous.previous, block.next)

    def absorb_behind(self, block: Block, following: Block) -> None:
        """Lets a block take the place of the one behind it as well."""
        block.size += following.size
        block.place_between(block.previous, following.next)

    def write(self, action: str, address: int, size: int, stream: int) -> None:
        """Logs what happened to a segment."""
        self.log.append(SegmentEvent(self.event, action, address, size, stream))

    def has_room(self, size: int) -> bool:
        """Tells whether the device has room for so much more."""
        capacity = self.settings.capacity_bytes
        return capacity is None or self.reserved + size <= capacity

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """Takes a free block that is large enough and, where splitting is bounded, not too large."""
        if self._collects:
            pool.searches += 1
        block = pool.fitting(size)
        if block is None:
            return None
        if block.segment.is_expandable:
            block = self._least_growable(pool, size)
            if block is None:
                return None
        if size < self._max_split:
            if block.size >= self._max_split:
                return None
        elif block.size >= size + NON_SPLIT_ROUNDING_BYTES:
            return None
        pool.remove(block)
        return block

    def _least_growable(self, pool: Pool, size: int) -> Block | None:
        """Chooses among blocks of expandable segments: one that could grow counts with what it could grow to."""
        candidates = pool.from_size(size)
        if not self.settings.expandable_segments:  # turned off since: such blocks are left alone
            return next((block for block in candidates if not block.segment.is_expandable), None)
        best = next(candidates)
        for block in candidates:
            if not best.is_split() or _growable_size(block) >= _growable_size(best):
                break
            best = block
        return best

    def _taken(self, pool: Pool, size: int) -> Block | None:
        """Takes memory from the device; gives back what is cached where it has none left."""
        if self._collects:
            collect_garbage(self)
        wanted = segment_size(size)
        block = self._new_block(pool, wanted)
        if block is None and release_oversized(self, pool, size):
            block = self._new_block(pool, wanted)
        if block is None:
            release_cached(self)
            self.retries += 1
            block = self._new_block(pool, wanted)
        return block

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        limit = self.settings.limit_bytes
        if limit is not None and self.reserved + size > limit:
            return None
        if self.settings.expandable_segments:
            return self._grown_block(pool, size)  # whole pages: up to one more than the limit allows, as in torch
        if not self.has_room(size):
            return None
        address = self._addresses(size, pool.stream)
        segment = self.add_segment(address, size, pool)
        block = self.make_block(address, size, segment)
        segment.first = block
        self.reserved += size
        self.write("segment_alloc", address, size, pool.stream)
        return block

    def _grown_block(self, pool: Pool, size: int) -> Block | None:
        """Maps the lowest unmapped addresses of an expandable segment until a free block is large enough."""
        block = find_growth(pool, size)
        if block is None:
            device = self.settings.capacity_bytes or ASSUMED_DEVICE_BYTES
            span = -(-(device + device // 8) // pool.page_bytes) * pool.page_bytes
            segment = self.add_segment(self._addresses(span, pool.stream), span, pool, is_expandable=True)
            block = self.make_block(segment.address, span, segment, UNMAPPED)
            segment.first = block
            pool.unmapped[block.address] = block
        if block.state == UNMAPPED and not map_pages(self, block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None  # find_growth saw enough addresses behind it
            if not map_pages(self, following, min(size - block.size, following.size)):
                return None
            block = following  # it took in the block before it
        pool.remove(block)
        return block

    def _is_worth_splitting(self, pool: Pool, size: int, rest: int) -> bool:
        if pool.is_small or self.settings.expandable_segments:
            return True  # the rest is at least one rounding unit, which is asked before
        return size < self._max_split and rest > SMALL_REQUEST_BYTES

    def _split(self, block: Block, size: int, pool: Pool) -> Block:
        """Cuts the front off a block; the rest keeps the block's record and is free."""
        front = self.make_block(block.address, size, block.segment)
        front.place_between(block.previous, block)
        block.address += size
        block.size -= size
        pool.add(block)
        return front


def _growable_size(block: Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and following.state == UNMAPPED else 0)
