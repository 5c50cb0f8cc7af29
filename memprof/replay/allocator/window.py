"""Reconstructs the blocks of a device before the first recorded event, backwards from those after the last."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from memprof.replay.allocator.blocks import ALLOCATED, FREE, PENDING, UNMAPPED
from memprof.replay.allocator.rules import SMALL_REQUEST_BYTES, SMALL_SEGMENT_BYTES, Settings, rounded_request
from memprof.trace.schema import NONE, AllocatorEvents, Ints

_SEGMENT_ACTIONS = frozenset(("segment_alloc", "segment_free", "segment_map", "segment_unmap"))


@dataclass(frozen=True)
class Range:
    """A segment, or the mapped part of an expandable one.

    Attributes:
        address: First byte.
        size: Bytes.
        stream: The stream.
        owner: Number of the memory pool, 0 for the default one.
        is_small: Whether it serves small requests.
        is_expandable: Whether it grows in place.
    """

    address: int
    size: int
    stream: int = 0
    owner: int = 0
    is_small: bool = False
    is_expandable: bool = False


@dataclass(frozen=True, eq=False)
class BlockMap:
    """Segments of a device and the blocks that tile them.

    Attributes:
        ranges: The segments.
        address: First byte of each block, shape ``(blocks,)``, ascending.
        size: Its bytes.
        requested: Bytes requested.
        state: FREE, ALLOCATED or PENDING.
    """

    ranges: list[Range]
    address: Ints
    size: Ints
    requested: Ints
    state: Ints

    def blocks_of(self, memory: Range, span: int) -> Iterator[tuple[int, int, int, int]]:
        """Yields the blocks of a segment, free ones included: address, bytes, requested bytes and state.

        Args:
            memory: The segment.
            span: Bytes to tile; those after the segment's end are unmapped.
        """
        end = memory.address + memory.size
        first, last = (int(place) for place in self.address.searchsorted([memory.address, end]))
        position = memory.address
        for row in range(first, last):
            address, size = int(self.address[row]), int(self.size[row])
            if address > position:
                yield position, address - position, 0, FREE
            yield address, size, int(self.requested[row]), int(self.state[row])
            position = address + size
        if end > position:
            yield position, end - position, 0, FREE
        if memory.address + span > end:
            yield end, memory.address + span - end, 0, UNMAPPED


def paired_frees(events: AllocatorEvents, end: BlockMap) -> AllocatorEvents:
    """Returns events in which every free has both entries or is a ``free``: a history may leave out one of the two.

    ``torch.cuda.memory._record_memory_history(skip_actions=["free_requested"])`` does.

    Args:
        events: The events of one device, in order.
        end: Its blocks after the last event: a free is not complete if its block is pending then.
    """
    requested, completed = events.action == "free_requested", events.action == "free_completed"
    if requested.any() == completed.any():
        return events
    is_pending = requested & np.isin(events.address, end.address[end.state == PENDING])
    is_free = (requested | completed) & ~is_pending
    return events.replace(action=np.where(is_free, "free", events.action).astype(object))


def rewound(events: AllocatorEvents, end: BlockMap, settings: Settings) -> BlockMap:
    """Undoes recorded events, last first.

    Of a freed block only the requested size is recorded; its true size is unknown where the block was not split to it.
    In large segments, a remainder too small to be split off is assumed to be part of it.

    Args:
        events: The events of one device, in order.
        end: Its blocks after the last event.
        settings: The allocator's settings.

    Returns:
        The allocated and pending blocks before the first event; everything between them is free.
    """
    lives = {
        address: (size, requested, state)
        for address, size, requested, state in zip(
            end.address.tolist(), end.size.tolist(), end.requested.tolist(), end.state.tolist(), strict=True
        )
        if state != FREE
    }
    guessed: dict[int, int] = {}  # blocks of unknown size, with the event that freed them
    ranges = {one.address: one for one in end.ranges}
    allocations = np.flatnonzero(events.action == "alloc")
    allocations = allocations[np.argsort(events.address[allocations], kind="stable")]
    allocated_at = events.address[allocations]
    # The first allocation at an address undoes everything after it there.
    place = np.searchsorted(allocated_at, events.address)
    is_known = np.append(allocated_at, NONE)[place] == events.address
    is_needed = ~is_known | (np.arange(len(events)) <= np.append(allocations, NONE)[place])
    is_needed |= np.fromiter(map(_SEGMENT_ACTIONS.__contains__, events.action.tolist()), np.bool_, len(events))
    needed = np.flatnonzero(is_needed)[::-1]
    columns = (needed, *(one[needed] for one in (events.action, events.address, events.size_bytes, events.stream)))
    for event, action, address, size, stream in zip(*(column.tolist() for column in columns), strict=True):
        if action == "alloc":
            lives.pop(address, None)
            guessed.pop(address, None)
        elif action in ("free_completed", "free"):
            lives[address] = (
                rounded_request(size, settings.divisions),
                size,
                PENDING if action != "free" else ALLOCATED,
            )
            guessed[address] = event
        elif action == "free_requested" and address in lives:
            lives[address] = (*lives[address][:2], ALLOCATED)
        elif action == "segment_alloc":
            ranges.pop(address, None)
        elif action == "segment_free":
            ranges[address] = Range(address, size, stream, is_small=size == SMALL_SEGMENT_BYTES)
        elif action in ("segment_map", "segment_unmap"):
            _remap(ranges, address, size if action == "segment_unmap" else -size, stream)
    large = sorted((one for one in ranges.values()), key=lambda one: one.address)
    _fill_slack(lives, guessed, large, allocated_at.tolist(), allocations.tolist())
    blocks = np.array([(address, *lives[address]) for address in sorted(lives)], dtype=np.int64).reshape(-1, 4)
    return BlockMap(large, blocks[:, 0], blocks[:, 1], blocks[:, 2], blocks[:, 3])


def _remap(ranges: dict[int, Range], address: int, change: int, stream: int) -> None:
    """Maps pages of an expandable segment again (change above 0), or unmaps them."""
    size = abs(change)
    if change > 0:
        behind = ranges.pop(address + size, None)
        before = next((one for one in ranges.values() if one.address + one.size == address), None)
        grown = size + (behind.size if behind else 0)
        if before is not None:
            ranges[before.address] = replace(before, size=before.size + grown)
        else:
            is_small = behind.is_small if behind else size % (10 * SMALL_SEGMENT_BYTES) != 0
            ranges[address] = Range(address, grown, stream, is_small=is_small, is_expandable=True)
        return
    around = next((one for one in ranges.values() if one.address <= address < one.address + one.size), None)
    if around is None:
        return
    del ranges[around.address]
    if address > around.address:
        ranges[around.address] = replace(around, size=address - around.address)
    rest = around.address + around.size - (address + size)
    if rest > 0:
        ranges[address + size] = replace(around, address=address + size, size=rest)


def _fill_slack(
    lives: dict[int, tuple[int, int, int]],
    guessed: dict[int, int],
    ranges: list[Range],
    allocated_at: list[int],
    allocations: list[int],
) -> None:
    """Extends blocks of guessed size to the next block, where the remainder would not have been split off.

    Args:
        lives: Bytes, requested bytes and state of each block by address; changed in place.
        guessed: Addresses of those of guessed size, with the event that freed each.
        ranges: The segments, by address.
        allocated_at: Addresses of all later allocations, ascending: one behind a block that is still alive shows where
            that block ends.
        allocations: Their events, those at one address in order.
    """
    ordered = sorted(lives)
    starts = [one.address for one in ranges]
    for place, address in enumerate(ordered):
        if address not in guessed:
            continue
        around = ranges[bisect_right(starts, address) - 1] if starts else None
        if around is None or around.is_small or around.is_expandable:
            continue
        size, requested, state = lives[address]
        bound = around.address + around.size
        following = min(ordered[place + 1], bound) if place + 1 < len(ordered) else bound
        end = address + size
        for other in range(bisect_left(allocated_at, end), len(allocated_at)):
            if allocated_at[other] >= min(following, end + SMALL_REQUEST_BYTES + 1):
                break
            if allocations[other] < guessed[address]:
                following = allocated_at[other]
                break
        if 0 < following - end <= SMALL_REQUEST_BYTES:
            lives[address] = (following - address, requested, state)
