"""Replays a sequence of requests through the caching allocator's model, in order around the operators."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from memprof.replay.allocator.blocks import Block
from memprof.replay.allocator.model import Addresses, CachingAllocator, SegmentEvent
from memprof.replay.allocator.rules import Settings, TieBreak
from memprof.trace.files.coded import Coded
from memprof.trace.schema import NONE, Bools, Ints

#: Kinds of requests. FREE is FREE_REQUESTED and FREE_COMPLETED at once; EMPTY_CACHE releases wholly free segments.
ALLOCATE, FREE, FREE_REQUESTED, FREE_COMPLETED, EMPTY_CACHE = 0, 1, 2, 3, 4
#: Events handled as Python objects at a time: few enough to use negligible memory.
_CHUNK = 1 << 15
Kinds = npt.NDArray[np.int8]
Ids = npt.NDArray[np.int32]
#: Order of events around one operator: outputs are allocated, it runs, then storages that die with it are freed.
_BIRTH, _WORK, _WORKED, _DEATH = 0, 1, 2, 3


@dataclass(frozen=True, eq=False)
class Requests:
    """A process's requests to the allocator of one device, in order.

    Attributes:
        kind: ALLOCATE, FREE, FREE_REQUESTED, FREE_COMPLETED or EMPTY_CACHE, shape ``(events,)``.
        allocation: The allocation of each, NONE for EMPTY_CACHE, shape ``(events,)``.
        size: Bytes requested by each allocation, above 0, shape ``(allocations,)``.
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
        """Builds requests on one stream and the default pool."""
        return Requests(
            kind=np.asarray(kind, dtype=np.int8),
            allocation=np.asarray(allocation, dtype=np.int32),
            size=np.asarray(size, dtype=np.int64),
            stream=np.zeros(len(size), dtype=np.int64),
            owner=np.zeros(len(size), dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, eq=False)
class Replay:
    """Result of replaying requests.

    Attributes:
        requests: The requests.
        events: Number of requests replayed.
        address: Address of each allocation, NONE for those that failed, shape ``(allocations,)``.
        block_bytes: Size of the block of each, 0 for those that failed, shape ``(allocations,)``.
        allocator: The allocator after the last event.
        start_reserved: Bytes reserved before the first.
        segment_events: The segment events, in order.
    """

    requests: Requests
    events: int
    address: Ints
    block_bytes: Ints
    allocator: CachingAllocator
    start_reserved: int = 0
    segment_events: list[SegmentEvent] = field(default_factory=list)

    def reserved(self) -> Ints:
        """Returns the reserved bytes after each event, shape ``(events,)``.

        Within an event they are never higher than after it: segments are released before more is reserved.
        """
        change = np.zeros(self.events, dtype=np.int64)
        signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1, "oom": 0}
        for happened in self.segment_events:
            change[happened.event] += signs[happened.action] * happened.size
        reserved: Ints = self.start_reserved + np.cumsum(change)
        return reserved

    def allocated(self) -> Ints:
        """Returns the allocated bytes after each event, shape ``(events,)``, starting from 0.

        Pending blocks do not count, as in torch's own ``allocated``.
        """
        kind, allocation = self.requests.kind[: self.events], self.requests.allocation[: self.events]
        change = np.where(kind <= FREE_REQUESTED, self.block_bytes[allocation], 0)
        change[kind != ALLOCATE] *= -1
        allocated: Ints = np.cumsum(change)
        return allocated

    def failed(self) -> Bools:
        """Returns which allocations failed because the device was full, shape ``(allocations,)``."""
        is_tried = np.zeros(len(self.address), dtype=np.bool_)
        done = self.requests.allocation[: self.events][self.requests.kind[: self.events] == ALLOCATE]
        is_tried[done] = True
        failed: Bools = is_tried & (self.address == NONE)
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

    A failed allocation is skipped, together with its free; replay continues.

    Args:
        requests: The requests.
        settings: The allocator's settings.
        tie_break: Choice among free blocks of equal size.
        addresses: Address source for new segments.
        allocator: An existing allocator to continue with, instead of a new one; modified in place.
        alive: Its allocated blocks, by allocation; modified in place.
        until: Number of events to replay.
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


def order_requests(created: Ints, freed: Ints, workers: Ints) -> tuple[Kinds, Ids, Ints]:
    """Orders allocations, workspaces and frees; of one moment and kind, by row.

    Args:
        created: Operator that makes each storage, NONE if live before.
        freed: Operator after which each is freed, NONE if live at the end.
        workers: Operators with a workspace, ascending.

    Returns:
        The kind of each event (ALLOCATE or FREE), its subject (storages, then workspaces), and its operator. Storages
        live before have no event of allocation.
    """
    born = np.flatnonzero(created != NONE).astype(np.int32)
    died = np.flatnonzero(freed != NONE).astype(np.int32)
    works = np.arange(len(created), len(created) + len(workers), dtype=np.int32)
    about = np.concatenate([born, works, works, died])
    moment = np.concatenate([created[born], workers, workers, freed[died]])
    stage = np.repeat(
        np.array([_BIRTH, _WORK, _WORKED, _DEATH], dtype=np.int8), [len(born), len(works), len(works), len(died)]
    )
    order = np.argsort(moment * 4 + stage, kind="stable")
    kind: Kinds = np.where(stage[order] <= _WORK, np.int8(ALLOCATE), np.int8(FREE))
    return kind, about[order], moment[order]


def fullest_device(devices: Coded, allocated_bytes: Ints) -> str:
    """Returns the device with most bytes; ``cpu`` where no other device has any.

    Args:
        devices: The device of each storage.
        allocated_bytes: The bytes of each.
    """
    sums = {
        str(name): int(allocated_bytes[devices.codes == code].sum())
        for code, name in enumerate(devices.distinct)
        if name not in ("cpu", "", "meta")
    }
    return max(sorted(sums), key=lambda name: sums[name], default="cpu")
