"""Columns in, columns out: replays any sequence of requests through the model of the caching allocator."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from memprof.replay.allocator.blocks import Block
from memprof.replay.allocator.model import Addresses, CachingAllocator, SegmentEvent
from memprof.replay.allocator.rules import Settings, TieBreak
from memprof.trace.schema import NONE, Bools, Ints

#: Kinds of requests. FREE is FREE_REQUESTED and FREE_COMPLETED at once; EMPTY_CACHE gives back what is wholly free.
ALLOCATE, FREE, FREE_REQUESTED, FREE_COMPLETED, EMPTY_CACHE = 0, 1, 2, 3, 4

#: Events handled as Python objects at a time: few enough not to count in memory.
_CHUNK = 1 << 15

Kinds = npt.NDArray[np.int8]
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Requests:
    """What a process asked of the allocator of one device, in order.

    Attributes:
        kind: ALLOCATE, FREE, FREE_REQUESTED, FREE_COMPLETED or EMPTY_CACHE, shape ``(events,)``.
        allocation: The allocation each is about, NONE for EMPTY_CACHE, shape ``(events,)``.
        size: Bytes asked for by each allocation, above 0, shape ``(allocations,)``.
        stream: Its stream.
        owner: Number of its memory pool, 0 for the default one.
    """

    kind: Kinds
    allocation: Ids
    size: Ints
    stream: Ints
    owner: Ids

    @staticmethod
    def of(kind: Ints, allocation: Ints, size: Ints) -> Requests:
        """Makes requests on one stream and the default pool."""
        return Requests(
            kind=np.asarray(kind, dtype=np.int8),
            allocation=np.asarray(allocation, dtype=np.int32),
            size=np.asarray(size, dtype=np.int64),
            stream=np.zeros(len(size), dtype=np.int64),
            owner=np.zeros(len(size), dtype=np.int32),
        )

    def __len__(self) -> int:
        """Returns the number of events."""
        return len(self.kind)


@dataclass(frozen=True, eq=False)
class Replay:
    """What the allocator did with some requests.

    Attributes:
        requests: The requests.
        events: How many of them were replayed.
        address: Where each allocation was put, NONE for those that were not made, shape ``(allocations,)``.
        block_bytes: Size of the block each was given, 0 for those that were not made, shape ``(allocations,)``.
        allocator: The allocator as it stands behind the last event.
        start_reserved: Bytes reserved before the first.
    """

    requests: Requests
    events: int
    address: Ints
    block_bytes: Ints
    allocator: CachingAllocator
    start_reserved: int = 0
    _log: list[SegmentEvent] = field(default_factory=list)

    def segment_events(self) -> list[SegmentEvent]:
        """Returns what happened to segments, in order."""
        return self._log

    def reserved(self) -> Ints:
        """Returns the reserved bytes after each event, shape ``(events,)``.

        Within an event they never stand higher than after it: what is given back is so before more is taken.
        """
        change = np.zeros(self.events, dtype=np.int64)
        signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1, "oom": 0}
        for happened in self._log:
            change[happened.event] += signs[happened.action] * happened.size
        reserved: Ints = self.start_reserved + np.cumsum(change)
        return reserved

    def allocated(self) -> Ints:
        """Returns the bytes of the blocks given out after each event, shape ``(events,)``; it starts from 0.

        What is freed and awaits another stream does not count, as in torch's own ``allocated``.
        """
        kind, allocation = self.requests.kind[: self.events], self.requests.allocation[: self.events]
        change = np.where(kind <= FREE_REQUESTED, self.block_bytes[allocation], 0)
        change[kind != ALLOCATE] *= -1
        allocated: Ints = np.cumsum(change)
        return allocated

    def failed(self) -> Bools:
        """Returns which allocations found the device full, shape ``(allocations,)``."""
        asked = np.zeros(len(self.address), dtype=np.bool_)
        done = self.requests.allocation[: self.events][self.requests.kind[: self.events] == ALLOCATE]
        asked[done] = True
        failed: Bools = asked & (self.address == NONE)
        return failed


def replay(
    requests: Requests,
    settings: Settings | None = None,
    *,
    tie_break: TieBreak = "address",
    addresses: Addresses | None = None,
    allocator: CachingAllocator | None = None,
    alive: dict[int, Block] | None = None,
    until: int | None = None,
) -> Replay:
    """Replays requests through the model.

    An allocation that finds the device full is left out, with its free; what follows goes on.

    Args:
        requests: The requests.
        settings: What the allocator is told.
        tie_break: Which of several free blocks of one size it takes.
        addresses: Where new segments are put.
        allocator: An allocator to go on with, instead of a fresh one made of the three above; it is changed.
        alive: The blocks it has given out already, by their allocation; they are changed.
        until: Replay only so many events.
    """
    allocator = allocator or CachingAllocator(settings, tie_break, addresses)
    blocks = alive if alive is not None else {}
    count = len(requests) if until is None else until
    address = np.full(len(requests.size), NONE, dtype=np.int64)
    block_bytes = np.zeros(len(requests.size), dtype=np.int64)
    for allocation, block in blocks.items():
        address[allocation], block_bytes[allocation] = block.address, block.size
    before, log_before = allocator.reserved, len(allocator.log)
    for start in range(0, count, _CHUNK):
        _replay_chunk(allocator, requests, slice(start, min(start + _CHUNK, count)), blocks, address, block_bytes)
    return Replay(requests, count, address, block_bytes, allocator, before, allocator.log[log_before:])


def _replay_chunk(
    allocator: CachingAllocator,
    requests: Requests,
    events: slice,
    blocks: dict[int, Block],
    address: Ints,
    block_bytes: Ints,
) -> None:
    """Replays some events: those of a chunk become Python numbers, and those it makes become columns, at once."""
    allocations = requests.allocation[events]
    made, addresses, sizes = [], [], []
    rows = zip(
        requests.kind[events].tolist(),
        allocations.tolist(),
        requests.size[allocations].tolist() if len(requests.size) else [0] * len(allocations),
        requests.stream[allocations].tolist() if len(requests.size) else [0] * len(allocations),
        requests.owner[allocations].tolist() if len(requests.size) else [0] * len(allocations),
        strict=True,
    )
    allocate, request_free, complete_free = allocator.allocate, allocator.request_free, allocator.complete_free
    for event, (kind, allocation, size, stream, owner) in enumerate(rows, start=events.start):
        if kind == ALLOCATE:
            allocator.event = event
            block = allocate(size, stream, owner)
            if block is not None:
                block.allocation = allocation
                blocks[allocation] = block
                made.append(allocation)
                addresses.append(block.address)
                sizes.append(block.size)
        elif kind == EMPTY_CACHE:
            allocator.event = event
            allocator.release_cached()
        elif kind == FREE_REQUESTED:
            if allocation in blocks:
                request_free(blocks[allocation])
        else:
            given = blocks.pop(allocation, None)
            if given is not None:
                complete_free(given)
    address[made] = addresses
    block_bytes[made] = sizes
