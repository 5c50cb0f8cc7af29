"""Compares the model with a recording of a real allocator: segments, addresses and final blocks."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

from memprof.replay.allocator.blocks import ALLOCATED, FREE, PENDING, UNMAPPED, Block
from memprof.replay.allocator.device_memory import expandable_span
from memprof.replay.allocator.model import CachingAllocator
from memprof.replay.allocator.rules import TIE_BREAKS, Settings, TieBreak
from memprof.replay.allocator.window import BlockMap, Range, paired_frees, rewound
from memprof.trace.schema import AllocatorEvents

_TAKEN = ("segment_alloc", "segment_map")
_GIVEN_BACK = ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class Mismatch:
    """One difference between model and recording.

    Attributes:
        event: Row of the recorded event; the number of events if it concerns the final map.
        what: One sentence: the recorded and the modelled behaviour.
    """

    event: int
    what: str


@dataclass(frozen=True, eq=False)
class Comparison:
    """Comparison of the model with a recording.

    Attributes:
        tie_break: The tie break used in the replay.
        is_complete: Whether the recording began before the first allocation; else the initial state was reconstructed.
        allocations: Allocations compared by address.
        segment_events: Segment events compared.
        blocks: Blocks of the final map compared.
        mismatches: Differences; after each, the model was reset to the recorded state.
        fitting: The tie breaks with equally few differences: several where the events cannot distinguish them.
        reserved_peak: Peak reserved bytes of the replay.
    """

    tie_break: TieBreak
    is_complete: bool
    allocations: int
    segment_events: int
    blocks: int
    reserved_peak: int
    mismatches: list[Mismatch] = field(default_factory=list)
    fitting: tuple[TieBreak, ...] = ()


def compare(
    events: AllocatorEvents, end: BlockMap, settings: Settings | None = None, tie_break: TieBreak | None = None
) -> Comparison:
    """Replays the recorded events of one device and compares each with the recording.

    Args:
        events: The events of one device, in order.
        end: Its blocks after the last event.
        settings: Settings of the recorded allocator.
        tie_break: Choice among free blocks of equal size; the best match if omitted.
    """
    settings, events = settings or Settings(), paired_frees(events, end)
    tried = [_Follower(events, end, settings, order).follow() for order in ([tie_break] if tie_break else TIE_BREAKS)]
    best = min(tried, key=lambda one: len(one.mismatches))  # the first of equals
    fitting = tuple(one.tie_break for one in tried if len(one.mismatches) == len(best.mismatches))
    return dataclasses.replace(best, fitting=fitting)


class _Follower:
    """One replay of recorded events, compared event by event."""

    def __init__(self, events: AllocatorEvents, end: BlockMap, settings: Settings, tie_break: TieBreak) -> None:
        self._events = events
        self._end = end
        self._settings = settings
        self._mismatches: list[Mismatch] = []
        self._expected: deque[tuple[str, int, int]] = deque()  # recorded segments not yet used by the model
        self._allocator = CachingAllocator(settings, tie_break, self._next_address)
        self._owners = owners_of(end, events)
        self._made_up = 1 << 50
        start = rewound(events, end, settings)
        self._is_complete = not start.ranges
        self._blocks: dict[int, Block] = {}
        for memory in start.ranges:
            self._restore(memory, start)

    def follow(self) -> Comparison:
        """Replays everything."""
        actions, allocations, compared = self._events.action.tolist(), 0, 0
        peak = self._allocator.reserved
        rows = zip(
            actions,
            self._events.address.tolist(),
            self._events.size_bytes.tolist(),
            self._events.stream.tolist(),
            self._owners,
            strict=True,
        )
        for event, (action, address, size, stream, owner) in enumerate(rows):
            self._allocator.event = event
            if action in _TAKEN:
                compared += 1
                self._expected.append((action, address, size))
            elif action in _GIVEN_BACK:
                compared += 1
                if event == 0 or actions[event - 1] not in _GIVEN_BACK:
                    self._free(event, actions)
            elif action == "alloc":
                allocations += 1
                self._allocate(event, address, size, stream, owner)
                peak = max(peak, self._allocator.reserved)
            elif action == "free_requested":
                if address in self._blocks:
                    self._allocator.request_free(self._blocks[address])
                else:
                    self._note(event, f"{size} bytes at {address:#x} are freed, which the model has not allocated")
            elif action in ("free_completed", "free"):
                block = self._blocks.pop(address, None)
                if block is not None:
                    self._allocator.complete_free(block)
        blocks = self._compare_end()
        return Comparison(
            self._allocator.tie_break, self._is_complete, allocations, compared, blocks, peak, self._mismatches
        )

    def _allocate(self, event: int, address: int, size: int, stream: int, owner: int) -> None:
        log_before = len(self._allocator.log)
        expected = list(self._expected)
        block = self._allocator.allocate(size, stream, owner)
        taken = [(one.action, one.address, one.size) for one in self._allocator.log[log_before:]]
        self._expected.clear()
        if taken != expected:
            self._note(event, f"recorded {_segments(expected)} for {size} bytes, modelled {_segments(taken)}")
        if block is None:
            return
        if block.address != address:
            self._note(
                event,
                f"{size} bytes were put at {address:#x}, by the model at {block.address:#x} (block of {block.size})",
            )
            moved = self._put_at(block, address)
            if moved is None:
                return
            block = moved
        block.requested = size
        self._blocks[address] = block

    def _put_at(self, block: Block, address: int) -> Block | None:
        """Moves a new allocation to its recorded address, so that later events can be compared."""
        pool, size = block.segment.pool, block.size
        self._allocator.complete_free(block)
        for free in pool.free_blocks():
            if free.address <= address < free.address + free.size:
                return take_at(self._allocator, free, address, min(size, free.address + free.size - address))
        return None

    def _free(self, event: int, actions: list[str]) -> None:
        """Releases the cache as a run of recorded segment_free events requires, and compares the two."""
        end = event
        while end < len(actions) and actions[end] in _GIVEN_BACK:
            end += 1
        recorded = list(
            zip(
                actions[event:end],
                self._events.address[event:end].tolist(),
                self._events.size_bytes[event:end].tolist(),
                strict=True,
            )
        )
        log_before = len(self._allocator.log)
        self._allocator.release_cached()
        done = [(one.action, one.address, one.size) for one in self._allocator.log[log_before:]]
        if sorted(done) != sorted(recorded):
            self._note(event, f"recorded {_segments(recorded)}, modelled {_segments(done)}")

    def _next_address(self, size: int, stream: int) -> int:
        """Returns the recorded address of the next segment; a synthetic one where there is none."""
        if self._expected:
            _, address, _ = self._expected.popleft()
            return address
        self._made_up += -(-size // (2 << 20)) * (2 << 20)
        return self._made_up

    def _restore(self, memory: Range, start: BlockMap) -> None:
        """Restores a segment and its blocks as they were before the first event."""
        allocator, settings = self._allocator, self._settings
        pool = allocator.pool(memory.owner, memory.stream, is_small=memory.is_small)
        span = memory.size
        if memory.is_expandable:
            span = max(span, expandable_span(settings, pool.page_bytes, span))
        segment = allocator.add_segment(memory.address, span, pool, is_expandable=memory.is_expandable)
        last: Block | None = None
        for address, size, requested, state in start.blocks_of(memory, span):
            block = allocator.make_block(address, size, segment, state)
            block.place_between(last, None)
            block.requested = requested
            if state == FREE:
                pool.add(block)
            elif state == UNMAPPED:
                pool.unmapped[address] = block
            else:
                self._blocks[address] = block
            if state != UNMAPPED:
                allocator.reserved += size
            last = block

    def _compare_end(self) -> int:
        """Compares the final blocks with the recorded ones: address, size and state."""
        modelled = {
            block.address: (block.size, block.state)
            for segment in self._allocator.segments.values()
            for block in segment.blocks()
            if block.state != UNMAPPED
        }
        recorded = {
            address: (size, state)
            for address, size, state in zip(
                self._end.address.tolist(), self._end.size.tolist(), self._end.state.tolist(), strict=True
            )
        }
        names = {FREE: "free", ALLOCATED: "given out", PENDING: "pending"}
        for address in sorted(modelled.keys() | recorded.keys()):
            ours, theirs = modelled.get(address), recorded.get(address)
            if ours != theirs:
                texts = [f"{one[0]} bytes {names[one[1]]}" if one else "no block" for one in (theirs, ours)]
                self._note(len(self._events), f"at the end {address:#x} has {texts[0]}, in the model {texts[1]}")
        return len(recorded)

    def _note(self, event: int, what: str) -> None:
        self._mismatches.append(Mismatch(event, what))


def _segments(events: list[tuple[str, int, int]]) -> str:
    return ", ".join(f"{action} of {size} at {address:#x}" for action, address, size in events) or "no new segment"


def take_at(allocator: CachingAllocator, free: Block, address: int, size: int) -> Block:
    """Allocates a given part of a free block, bypassing the search."""
    pool = free.segment.pool
    pool.remove(free)
    if address > free.address:
        allocator._split(free, address - free.address, pool)
        pool.add(free.previous)  # type: ignore[arg-type]  # the front that was just split off
        pool.remove(free)
    block = allocator._split(free, size, pool) if size < free.size else free
    block.state = ALLOCATED
    return block


def owners_of(end: BlockMap, events: AllocatorEvents) -> list[int]:
    """Returns the memory pool of each event, from its segment: only the latest torch records it."""
    ordered = sorted(end.ranges, key=lambda one: one.address)
    starts = [one.address for one in ordered]
    owners = []
    for address in events.address.tolist():
        place = bisect_right(starts, address) - 1
        inside = place >= 0 and address < ordered[place].address + ordered[place].size
        owners.append(ordered[place].owner if inside else 0)
    return owners
