"""A recording's requests to the caching allocator, and the sizes of blocks that its addresses show."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memprof.replay.allocator.blocks import ALLOCATED, FREE, PENDING, UNMAPPED
from memprof.replay.allocator.events import ALLOCATE, Requests, fullest_device, order_requests
from memprof.replay.allocator.rules import ROUNDING_BYTES, SMALL_REQUEST_BYTES, Settings, rounded_request
from memprof.replay.allocator.steps import StepRequests
from memprof.replay.allocator.window import BlockMap, paired_frees, rewound
from memprof.trace.schema import NONE, AllocatorEvents, Ints, Ops, Storages
from memprof.trace.store import Trace


class UsedBlock(NamedTuple):
    """A block in use: its bytes, the bytes requested, ALLOCATED or PENDING, and its allocation stack."""

    size: int
    requested: int
    state: int
    stack_id: int


def blocks_in_use(events: AllocatorEvents) -> dict[int, UsedBlock]:
    """Returns the blocks in use after some recorded events with block sizes, by address.

    Args:
        events: The events of one device, in order, those that list what was there before first.
    """
    used: dict[int, UsedBlock] = {}
    columns = (events.action, events.address, events.block_bytes, events.size_bytes, events.stack_id, events.index)
    is_completed = bool((events.action == "free_completed").any())
    for action, address, size, requested, stack, index in zip(*(column.tolist() for column in columns), strict=True):
        if action == "alloc" and size > 0:
            used[address] = UsedBlock(size, requested, ALLOCATED, stack)
        # Of those before the history, only what was still pending is listed.
        elif action in ("free", "free_completed") or (
            action == "free_requested" and not is_completed and index != NONE
        ):
            used.pop(address, None)
        elif action == "free_requested" and address in used:
            used[address] = used[address]._replace(state=PENDING)
    return used


def block_sizes(events: AllocatorEvents, end: BlockMap, settings: Settings) -> Ints:
    """Returns the size of the block that each event allocates or frees.

    The allocator splits a free block only where the remainder is worth it; else the block is larger than requested.

    Args:
        events: The events of one device, in order.
        end: Its blocks after the last event.
        settings: The allocator's settings.

    Returns:
        Bytes, shape ``(events,)``; 0 for other events, and where the history does not determine the size.
    """
    events = paired_frees(events, end)
    start = rewound(events, end, settings)
    is_mapped = bool((events.action == "segment_map").any()) or any(one.is_expandable for one in end.ranges)
    space = _Space(settings, is_expandable=settings.expandable_segments or is_mapped)
    for memory in start.ranges:
        space.edges.add(memory.address)
        for address, size, _, state in start.blocks_of(memory, memory.size):
            if state == FREE:
                space.add_free(address, size)
            elif state != UNMAPPED:
                space.live[address] = size
    found = [0] * len(events)
    rounded = {size: rounded_request(size, settings.divisions) for size in set(events.size_bytes.tolist())}
    rows = zip(events.action.tolist(), events.address.tolist(), events.size_bytes.tolist(), strict=True)
    for row, (action, address, size) in enumerate(rows):
        if action == "alloc":
            found[row] = space.take(address, rounded[size])
        elif action == "free_requested":
            found[row] = space.live.get(address, 0)
        elif action in ("free_completed", "free"):
            found[row] = space.release(address)
        elif action in ("segment_alloc", "segment_map"):
            if action == "segment_alloc":
                space.edges.add(address)
            space.free(address, size)
        elif action in ("segment_free", "segment_unmap"):
            space.cut(address, size)
    return np.array(found, dtype=np.int64)


class _Space:
    """Free and live blocks by address.

    Attributes:
        live: Bytes of each live block by its address.
        edges: First addresses of segments, across which free blocks are not merged.
    """

    def __init__(self, settings: Settings, *, is_expandable: bool) -> None:
        self._settings = settings
        self._is_expandable = is_expandable
        self._size: dict[int, int] = {}  # free blocks: bytes by first address
        self._start: dict[int, int] = {}  # and first address by the address behind them
        self.live: dict[int, int] = {}
        self.edges: set[int] = set()

    def take(self, address: int, size: int) -> int:
        """Allocates the front of the free block at an address; returns the bytes, 0 where none is known there."""
        room = self._size.get(address, 0)
        if room < size:
            self.live[address] = size
            return 0
        self._remove(address)
        if self._is_split(size, room - size):
            self.add_free(address + size, room - size)
        else:
            size = room
        self.live[address] = size
        return size

    def release(self, address: int) -> int:
        """Frees the live block at an address; returns its bytes."""
        size = self.live.pop(address, 0)
        if size:
            self.free(address, size)
        return size

    def free(self, address: int, size: int) -> None:
        """Adds a free block, merged with its free neighbours in the segment."""
        before = self._start.get(address)
        if before is not None and address not in self.edges:
            size += self._remove(before)
            address = before
        behind = address + size
        if behind in self._size and behind not in self.edges:
            size += self._remove(behind)
        self.add_free(address, size)

    def cut(self, address: int, size: int) -> None:
        """Removes released memory from the free block that contains it."""
        start = (
            address
            if address in self._size
            else next((first for first, bytes_ in self._size.items() if first <= address < first + bytes_), None)
        )
        if start is None:
            return
        end = start + self._remove(start)
        if address > start:
            self.add_free(start, address - start)
        if end > address + size:
            self.add_free(address + size, end - address - size)
        self.edges.discard(address)

    def add_free(self, address: int, size: int) -> None:
        """Adds a free block as it is."""
        self._size[address] = size
        self._start[address + size] = address

    def _remove(self, address: int) -> int:
        size = self._size.pop(address)
        if self._start.get(address + size) == address:  # else segments of a damaged file overlap
            del self._start[address + size]
        return size

    def _is_split(self, size: int, rest: int) -> bool:
        if size <= SMALL_REQUEST_BYTES or self._is_expandable:
            return rest >= ROUNDING_BYTES
        limit = self._settings.max_split_size_bytes
        return rest > SMALL_REQUEST_BYTES and (limit is None or size < limit)


def requests_of_trace(trace: Trace) -> StepRequests:
    """Lists the requests of a whole recording, each operator once; otherwise as ``steps.requests_of_step``.

    Ten million requests take about 0.4 GB, and 0.7 GB while they are put in order.

    Raises:
        BadInputError: A table is damaged.
    """
    # One column at a time: as read, each takes at least twice its stored size.
    allocated: Ints = trace.columns(Storages, "allocated_bytes")["allocated_bytes"]
    devices = trace.columns(Storages, "device")["device"]
    device = fullest_device(devices, allocated)
    is_owned = allocated > 0
    if device != "cpu":
        is_owned &= devices.codes == np.flatnonzero(devices.distinct == device)[0]
    del allocated, devices
    requested: Ints = trace.columns(Storages, "requested_bytes")["requested_bytes"]
    rows = np.flatnonzero(is_owned & (requested > 0))
    workspace: Ints = trace.columns(Ops, "workspace_bytes")["workspace_bytes"]
    workers = np.flatnonzero(workspace > 0)
    size = np.concatenate([requested[rows], workspace[workers]])
    del is_owned, requested, workspace
    created: Ints = trace.columns(Storages, "created_op_id")["created_op_id"][rows]
    freed: Ints = trace.columns(Storages, "freed_op_id")["freed_op_id"][rows]
    kind, about, moment = order_requests(created, freed, workers)
    del freed
    made_by = np.concatenate([created, workers])
    base = np.flatnonzero(created == NONE)
    del created
    streams: Ints = trace.columns(Ops, "stream")["stream"]
    stream = np.where(made_by == NONE, 0, streams[made_by]) if len(streams) else np.zeros(len(made_by), dtype=np.int64)
    return StepRequests(
        requests=Requests(
            kind=np.concatenate([np.full(len(base), ALLOCATE, dtype=np.int8), kind]),
            allocation=np.concatenate([base.astype(np.int32), about]),
            size=size,
            stream=stream,
            owner=np.zeros(len(size), dtype=np.int32),
        ),
        steady_from=len(base),
        op_id=np.concatenate([np.full(len(base), NONE), moment]),
        storage_id=np.concatenate([rows, np.full(len(workers), NONE)]),
        made_by=made_by,
        device=device,
    )
