"""The CUDA caching allocator: allocates blocks as torch does, and logs the segments it reserves and releases.

Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.0 to 2.13, modelled from its behaviour. Left out: anything that
does not change which block is allocated, such as statistics, driver events and sharing between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from memprof.replay.allocator.blocks import ALLOCATED, FREE, PENDING, UNMAPPED, Block, Pool, Segment
from memprof.replay.allocator.device_memory import (
    collect_garbage,
    expandable_span,
    find_growth,
    join_neighbours,
    map_pages,
    release_cached,
    release_oversized,
)
from memprof.replay.allocator.rules import (
    NON_SPLIT_ROUNDING_BYTES,
    ROUNDING_BYTES,
    SMALL_REQUEST_BYTES,
    Settings,
    TieBreak,
    rounded_request,
    segment_size,
)

#: Start of the synthetic address space, and the alignment of its segments.
_FIRST_ADDRESS = 1 << 40
_ALIGNMENT = 2 << 20


class SegmentEvent(NamedTuple):
    """One segment event, named as by the allocator.

    Attributes:
        event: Position of the request during which it happened.
        action: ``segment_alloc``, ``segment_free``, ``segment_map``, ``segment_unmap`` or ``oom``.
        address: First byte; for ``oom``, the bytes of the device that were free.
        size: Bytes reserved or released; for ``oom``, the bytes that were unavailable.
        stream: The stream.
    """

    event: int
    action: str
    address: int
    size: int
    stream: int


Addresses = Callable[[int, int], int]


def rising_addresses() -> Addresses:
    """Returns a source of ever higher addresses, like a driver that never reuses any."""
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
        settings: Its settings.
        tie_break: Choice among free blocks of equal size.
        reserved: Bytes of all segments; of expandable ones, the mapped bytes.
        event: Index of the current request, for the log; set by the caller.
        log: Segment events.
        retries: Times the cache was released because the device was full.
        segments: Segments by address.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        tie_break: TieBreak = "address",
        addresses: Addresses | None = None,
    ) -> None:
        """Starts with nothing reserved.

        Args:
            settings: Its settings; torch's defaults if omitted.
            tie_break: Choice among free blocks of equal size.
            addresses: Returns the address of a new segment of a size on a stream; rising addresses if omitted.
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
        # Nothing keeps a request from the smallest block that is large enough.
        self._is_plain = self.settings.max_split_size_bytes is None and not self._collects

    def allocate(self, requested: int, stream: int = 0, owner: int = 0) -> Block | None:
        """Allocates a block.

        Args:
            requested: Bytes requested, above 0.
            stream: Its stream.
            owner: Number of the memory pool, 0 for the default one.

        Returns:
            The block; None where the device is full even after the cache was released.
        """
        divisions = self._divisions
        size = rounded_request(requested, divisions) if divisions else (requested + 511) & ~511
        is_small = size <= SMALL_REQUEST_BYTES
        pool = self._pools.get((owner, stream, is_small)) or self.pool(owner, stream, is_small=is_small)
        block = (pool.take(size) if self._is_plain else self._cached(pool, size)) or self._taken(pool, size)
        if block is None:
            self.log.append(SegmentEvent(self.event, "oom", self.free_on_device, size, stream))
            return None
        rest = block.size - size
        if rest >= ROUNDING_BYTES and self._is_worth_splitting(pool, size, rest):
            block = self._split(block, size, pool)
        block.state = ALLOCATED
        block.requested = requested
        return block

    @property
    def free_on_device(self) -> int:
        """Bytes of the device that no segment has; 0 where its size is unknown."""
        capacity = self.settings.capacity_bytes
        return 0 if capacity is None else max(capacity - self.reserved, 0)

    def request_free(self, block: Block) -> None:
        """Frees a block, which stays pending until ``complete_free``."""
        block.state = PENDING

    def complete_free(self, block: Block) -> None:
        """Makes a pending block free and merges it with its free neighbours."""
        block.state = FREE
        join_neighbours(block)
        block.segment.pool.add(block)

    def release_cached(self) -> None:
        """Releases every wholly free segment, as ``torch.cuda.empty_cache()`` and a full device do."""
        release_cached(self)

    def pool(self, owner: int, stream: int, *, is_small: bool) -> Pool:
        """Returns a pool, created empty at first use."""
        key = (owner, stream, is_small)
        if key not in self._pools:
            self._pools[key] = Pool(owner, stream, self.tie_break, is_small=is_small)
        return self._pools[key]

    def pools(self) -> Iterator[Pool]:
        """Iterates over the pools."""
        return iter(self._pools.values())

    def largest_free(self) -> int:
        """Returns the bytes of the largest free block."""
        blocks = (pool.largest() for pool in self._pools.values())
        return max((block.size for block in blocks if block is not None), default=0)

    def add_segment(self, address: int, size: int, pool: Pool, *, is_expandable: bool = False) -> Segment:
        """Registers a segment; the caller creates its blocks and counts its mapped bytes."""
        self._is_plain = self._is_plain and not is_expandable
        segment = Segment(address, size, pool, self._segments_made, is_expandable=is_expandable)
        self._segments_made += 1
        self.segments[address] = segment
        return segment

    def make_block(self, address: int, size: int, segment: Segment, state: int = FREE) -> Block:
        """Creates an unlinked block."""
        block = Block(address, size, segment, self._blocks_made, state)
        self._blocks_made += 1
        return block

    def write(self, action: str, address: int, size: int, stream: int) -> None:
        """Logs a segment event."""
        self.log.append(SegmentEvent(self.event, action, address, size, stream))

    def has_room(self, size: int) -> bool:
        """Returns whether the device has room for that many more bytes."""
        capacity = self.settings.capacity_bytes
        return capacity is None or self.reserved + size <= capacity

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """Takes a free block that is large enough and, where splitting is limited, not too large."""
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
        """Chooses among blocks of expandable segments; growable ones count with their possible size."""
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
        """Reserves memory on the device, releasing the cache if the device is full."""
        if self._collects:
            collect_garbage(self)
        block = self._new_block(pool, size)
        if block is None and release_oversized(self, pool, size):
            block = self._new_block(pool, size)
        if block is None:
            release_cached(self)
            self.retries += 1
            block = self._new_block(pool, size)
        return block

    def _new_block(self, pool: Pool, rounded: int) -> Block | None:
        size, limit = segment_size(rounded), self.settings.limit_bytes
        if limit is not None and self.reserved + size > limit:
            return None
        if self.settings.expandable_segments:
            # By the request itself; in whole pages, up to one more than the limit allows, as in torch.
            return self._grown_block(pool, rounded)
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
            span = expandable_span(self.settings, pool.page_bytes, size)
            if span < size:
                return None  # more than the device has
            segment = self.add_segment(self._addresses(span, pool.stream), span, pool, is_expandable=True)
            block = self.make_block(segment.address, span, segment, UNMAPPED)
            segment.first = block
            pool.unmapped[block.address] = block
        if block.state == UNMAPPED and not map_pages(self, block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None  # find_growth checked that enough addresses follow
            if not map_pages(self, following, min(size - block.size, following.size)):
                return None
            block = following  # it was merged with the block before it
        pool.remove(block)
        return block

    def _is_worth_splitting(self, pool: Pool, size: int, rest: int) -> bool:
        if pool.is_small or self.settings.expandable_segments:
            return True  # the rest is at least one rounding unit, checked before
        return size < self._max_split and rest > SMALL_REQUEST_BYTES

    def _split(self, block: Block, size: int, pool: Pool) -> Block:
        """Splits the front off a block; the rest keeps the block's record and is free."""
        front = self.make_block(block.address, size, block.segment)
        front.place_between(block.previous, block)
        block.address += size
        block.size -= size
        pool.add(block)
        return front


def _growable_size(block: Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and following.state == UNMAPPED else 0)
