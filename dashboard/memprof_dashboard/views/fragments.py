"""A device allocator's segments at one moment: what is in use in each, and the largest hole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memprof.analysis.out_of_memory.room import is_much_scattered
from memprof.replay.allocator.rules import ROUNDING_BYTES, SMALL_SEGMENT_BYTES
from memprof.trace.schema import NONE, AllocatorEvents, Bools, Ints, Segments
from memprof.trace.store import Trace

#: Events that finally free a block; until then a freed one may be in use by another stream.
_COMPLETED = ("free", "free_completed")


@dataclass(frozen=True, eq=False)
class Fragments:
    """Segments, the lowest address first; arrays of shape ``(segments,)``.

    Attributes:
        segments: The segments.
        allocated: Bytes in use.
        awaiting: Bytes pending free (in use by another stream).
        free: Bytes reserved but unallocated.
        hole: The largest hole in each, ``NONE`` where unknown.
        request_bytes: The largest request that failed until then, 0 where none did.
        block_address: Address of each block that the events leave alive, ascending, shape ``(blocks,)``.
        block_bytes: Its bytes.
        is_block_used: Whether it is in use; otherwise it is pending free.
    """

    segments: Segments
    allocated: Ints
    awaiting: Ints
    free: Ints
    hole: Ints
    request_bytes: int
    block_address: Ints
    block_bytes: Ints
    is_block_used: Bools

    @property
    def largest_hole(self) -> int:
        """The largest known hole; ``NONE`` where none is known."""
        return int(self.hole.max(initial=NONE))

    @property
    def most_hole(self) -> int:
        """Upper bound of the largest hole: where a hole is unknown, all free bytes of its segment."""
        return int(np.where(self.hole == NONE, self.free, self.hole).max(initial=0))

    @property
    def is_told(self) -> bool:
        """Whether the largest hole is known: no segment with unknown holes could have a larger one."""
        return self.largest_hole == self.most_hole

    @property
    def idle_bytes(self) -> int:
        """Bytes of segments that are entirely free: the allocator releases them before a request fails."""
        return int(self.free[self.free == self.segments.total_size_bytes].sum())

    @property
    def scattered_bytes(self) -> int:
        """Free bytes of segments that are partly in use, which no request above the largest hole can use."""
        return int(self.free.sum()) - self.idle_bytes

    @property
    def scattered_hole(self) -> int:
        """Upper bound of the largest hole in segments that are partly in use."""
        is_partly = self.free < self.segments.total_size_bytes
        return int(np.where(self.hole == NONE, self.free, self.hole)[is_partly].max(initial=0))

    @property
    def is_fragmented(self) -> bool:
        """Whether the scattered bytes that no single request could use are enough to matter."""
        unusable = self.scattered_bytes - self.scattered_hole
        return is_much_scattered(unusable, int(self.segments.total_size_bytes.sum()))


class AllocatorHistory:
    """A recording's segments and blocks over its operators; blocks are paired once, a moment takes milliseconds."""

    def __init__(self, trace: Trace) -> None:
        """Reads the allocator's tables.

        Args:
            trace: The recording; of a job on CPU it has no segments.

        Raises:
            BadInputError: The recording is damaged.
        """
        segments = trace.table(Segments)
        self._last = segments.take(np.argsort(segments.address, kind="stable"))
        self._events = trace.table(AllocatorEvents)

    @property
    def has_segments(self) -> bool:
        """Whether it holds a snapshot of the allocator."""
        return bool(len(self._last))

    @property
    def follows_cursor(self) -> bool:
        """Whether its events tell earlier states than the last."""
        return bool((self._events.op_id != NONE).any())

    def at(self, op_id: int | None = None) -> Fragments:
        """Returns the state while an operator runs, when it holds most; the last state where none is given.

        A hole is what is free between two blocks of a segment. The blocks are those that the allocator's events leave
        alive; a segment's holes are known where these blocks sum at the end to what the snapshot says is in use in it
        (not where some were taken before the recording began and not freed in it), and where it is all free or used.
        """
        events = self._events
        end = len(events) if op_id is None else self._fullest_moment(op_id)
        segments = self._segments_at(end)
        start, size, is_used, used, awaiting = self._blocks_at(end, segments)
        known = used + awaiting
        total = segments.total_size_bytes
        rest = np.minimum(self._unknown_bytes(segments), total - np.minimum(known, total))
        free = total - known - rest
        hole = np.where(free == 0, 0, np.where(free == total, total, NONE))
        is_exact = (rest == 0) & (free >= 0)
        hole = np.where((hole == NONE) & is_exact, _largest_gaps(segments, start, size), hole)
        failed = events.size_bytes[:end][events.action[:end] == "oom"]
        most = int(failed.max(initial=0))
        return Fragments(segments, used + rest, awaiting, np.maximum(free, 0), hole, most, start, size, is_used)

    def _fullest_moment(self, op_id: int) -> int:
        """Returns how many events have happened when an operator holds most."""
        events = self._events
        first, end = np.searchsorted(events.op_id, [op_id, op_id + 1])
        action = events.action[first:end]
        sign = np.where(action == "alloc", 1, np.where(np.isin(action.astype(str), _COMPLETED), -1, 0))
        held = np.concatenate([[0], np.cumsum(sign * events.size_bytes[first:end])])
        return int(first + np.argmax(held))

    def _segments_at(self, end: int) -> Segments:
        """Rewinds the last segments to before the events from ``end`` on."""
        events, last = self._events, self._last
        later = np.char.startswith(events.action[end:].astype(str), "segment")
        if not later.any():
            return last
        sizes = dict(zip(last.address.tolist(), last.total_size_bytes.tolist(), strict=True))
        rows = end + np.flatnonzero(later)[::-1]
        columns = (events.action, events.address, events.size_bytes)
        for action, address, size in zip(*(column[rows].tolist() for column in columns), strict=True):
            if action == "segment_alloc":
                sizes.pop(address, None)
            elif action == "segment_free":
                sizes[address] = size
            else:
                # What grows in place grows and shrinks at its end.
                around = max((start for start in sizes if start <= address), default=address)
                sizes[around] = max(sizes.get(around, 0) + (-size if action == "segment_map" else size), 0)
        place = {address: row for row, address in enumerate(last.address.tolist())}
        addresses = sorted(address for address, size in sizes.items() if size)
        kept = np.array([place[address] for address in addresses if address in place], dtype=np.int64)
        gone = [address for address in addresses if address not in place]
        freed = Segments.of(
            address=gone,
            device=[str(last.device[0]) if len(last) else ""] * len(gone),
            segment_type=["small" if sizes[address] <= SMALL_SEGMENT_BYTES else "large" for address in gone],
            total_size_bytes=[sizes[address] for address in gone],
        )
        joined = Segments.joined((last.take(kept), freed))
        joined = joined.take(np.argsort(joined.address, kind="stable"))
        return joined.replace(total_size_bytes=np.array([sizes[address] for address in joined.address.tolist()]))

    @cached_property
    def _lives(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Blocks: address, size, and the events that allocate, request to free and free each, shape ``(blocks,)``.

        One that is freed without having been allocated was there before; one that is never freed ends behind the last
        event.
        """
        events = self._events
        action = events.action.astype(str)
        is_alloc, is_request, is_done = action == "alloc", action == "free_requested", np.isin(action, _COMPLETED)
        if not is_done.any():
            is_request, is_done = np.zeros_like(is_request), is_request
        rows = np.flatnonzero(is_alloc | is_request | is_done)
        rows = rows[np.argsort(events.address[rows], kind="stable")]
        address = events.address[rows]
        never = len(events)
        # The next event of the same address that allocates, requests or frees, for each event.
        block = np.cumsum(is_alloc[rows] | np.append(True, address[1:] != address[:-1])[: len(rows)]) - 1
        count = int(block[-1]) + 1 if len(block) else 0
        first = np.searchsorted(block, np.arange(count))
        made = np.where(is_alloc[rows[first]], rows[first], NONE)
        requested, done = (np.full(count, never, dtype=np.int64) for _ in range(2))
        np.minimum.at(requested, block[is_request[rows]], rows[is_request[rows]])
        np.minimum.at(done, block[is_done[rows]], rows[is_done[rows]])
        # An address that is allocated again was freed, whether or not the event was recorded.
        again = np.full(count, never, dtype=np.int64)
        is_same = address[first[1:]] == address[first[:-1]]
        again[:-1][is_same] = rows[first[1:]][is_same]
        done = np.minimum(done, again)
        known = events.block_bytes[rows[first]]
        asked = -(-events.size_bytes[rows[first]] // ROUNDING_BYTES) * ROUNDING_BYTES
        return address[first], np.where(known > 0, known, asked), made, np.minimum(requested, done), done

    def _blocks_at(self, end: int, segments: Segments) -> tuple[Ints, Ints, Bools, Ints, Ints]:
        """Returns address, size and use of the blocks in segments, and bytes in use and awaiting by segment."""
        address, size, made, requested, done = self._lives
        is_alive = (made < end) & (done >= end)
        address, size, requested = address[is_alive], size[is_alive], requested[is_alive]
        row = np.searchsorted(segments.address, address, side="right") - 1
        is_inside: Bools = row >= 0
        is_inside &= address + size <= (segments.address + segments.total_size_bytes)[np.maximum(row, 0)]
        address, size, requested, row = address[is_inside], size[is_inside], requested[is_inside], row[is_inside]
        used, awaiting = np.zeros(len(segments), dtype=np.int64), np.zeros(len(segments), dtype=np.int64)
        is_used = requested >= end
        np.add.at(used, row[is_used], size[is_used])
        np.add.at(awaiting, row[~is_used], size[~is_used])
        return address, size, is_used, used, awaiting

    @cached_property
    def _unknown(self) -> dict[int, int]:
        """Bytes in use at the end in blocks that no event allocated, by the address of the segment."""
        *_, used, awaiting = self._blocks_at(len(self._events), self._last)
        rest = np.maximum(self._last.active_size_bytes - used - awaiting, 0)
        return dict(zip(self._last.address.tolist(), rest.tolist(), strict=True))

    def _unknown_bytes(self, segments: Segments) -> Ints:
        return np.array([self._unknown.get(address, 0) for address in segments.address.tolist()], dtype=np.int64)


def _largest_gaps(segments: Segments, address: Ints, size: Ints) -> Ints:
    """Returns the largest gap between blocks in each segment, shape ``(segments,)``; blocks are sorted by address."""
    first, total = segments.address, segments.total_size_bytes
    row = np.searchsorted(first, address, side="right") - 1
    # A block of no bytes at each end of each segment.
    starts = np.concatenate([first, address, first + total])
    ends = np.concatenate([first, address + size, first + total])
    rows = np.concatenate([np.arange(len(first)), row, np.arange(len(first))])
    order = np.lexsort((starts, rows))
    starts, ends, rows = starts[order], ends[order], rows[order]
    gaps = np.where(rows[1:] == rows[:-1], starts[1:] - ends[:-1], 0)
    largest = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(largest, rows[1:], gaps)
    return largest
