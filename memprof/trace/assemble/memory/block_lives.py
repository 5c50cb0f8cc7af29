"""Pairs allocations with frees: which events are one allocation, block lifetimes, the allocated bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.assemble.timeline import NEVER, Timeline
from memprof.trace.schema import NONE, Bools, Ints


@dataclass(frozen=True)
class BlockLives:
    """Lives of blocks, sorted by address and birth. Shape (lives,) each.

    Attributes:
        address: Where the block was.
        size_bytes: Its size.
        born: Index of the event that allocated it; NONE when alive before.
        died: Index of the event that freed it; NEVER when alive at the end.
    """

    address: Ints
    size_bytes: Ints
    born: Ints
    died: Ints

    def find(self, address: Ints, position: Ints) -> Ints:
        """Returns the life at each address after a given number of events; NONE where there is none."""
        if not len(self.address):
            return np.full(len(address), NONE, dtype=np.int64)
        known, code = np.unique(self.address, return_inverse=True)
        span = int(max(self.born.max(initial=0), position.max(initial=0))) + 2
        keys = code * span + self.born + 1
        place = np.searchsorted(known, address)
        place_inside = np.minimum(place, len(known) - 1)
        is_known = known[place_inside] == address
        row = np.searchsorted(keys, place_inside * span + position, side="right") - 1
        row_inside = np.maximum(row, 0)
        is_alive = is_known & (row >= 0) & (self.address[row_inside] == address) & (self.died[row_inside] >= position)
        return np.where(is_alive, row_inside, NONE)


def pair(timeline: Timeline, alive_address: Ints, alive_bytes: Ints) -> BlockLives:
    """Pairs events into lives.

    A free of an unknown block means that it was alive before. A second allocation at an address means that the
    free between them was missed (it ran on another thread): the block died no later than that.

    Args:
        timeline: The events.
        alive_address: Blocks known to be alive before the first event.
        alive_bytes: Their sizes.
    """
    events = len(timeline.event_address)
    address = np.concatenate([alive_address, timeline.event_address])
    size = np.concatenate([alive_bytes, timeline.event_bytes])
    index = np.concatenate([np.full(len(alive_address), NONE, dtype=np.int64), np.arange(events, dtype=np.int64)])
    order = np.lexsort((index, address))
    address, size, index = address[order], size[order], index[order]
    is_allocating = size > 0
    same_next = np.zeros(len(address), dtype=np.bool_)
    same_next[:-1] = address[1:] == address[:-1]
    same_previous = np.zeros(len(address), dtype=np.bool_)
    same_previous[1:] = same_next[:-1]

    died = np.full(len(address), NEVER, dtype=np.int64)
    followed = np.flatnonzero(is_allocating & same_next)
    died[followed] = index[followed + 1]
    # A free without a preceding allocation: the life began before the recording.
    previous_is_taking = np.zeros(len(address), dtype=np.bool_)
    previous_is_taking[1:] = is_allocating[:-1]
    is_older = ~is_allocating & ~(same_previous & previous_is_taking)
    is_life = is_allocating | is_older
    return BlockLives(
        address=address[is_life],
        size_bytes=np.abs(size[is_life]),
        born=np.where(is_older, NONE, index)[is_life],
        died=np.where(is_older, index, died)[is_life],
    )


@dataclass(frozen=True)
class Counter:
    """Allocated bytes over time, and which lives stay within one operator.

    Attributes:
        peak: Peak while each row ran. Shape (ops,).
        before: Value before each row. Shape (ops,).
        is_temporary: Lives that begin and end inside one row. Shape (lives,).
    """

    peak: Ints
    before: Ints
    is_temporary: Bools


def count(
    timeline: Timeline, lives: BlockLives, start_bytes: int, is_void: Bools, extra: Ints, relief: Ints
) -> Counter:
    """Replays the allocator's counter through the events.

    Args:
        timeline: Rows and events.
        lives: Lives of blocks.
        start_bytes: The counter's value before the first event.
        is_void: Events that do not happen in the unrecorded run. Shape (events,).
        extra: Bytes allocated elsewhere before each event, negative where freed. Shape (events,).
        relief: The part of it freed by the time each row ran, negative. Shape (rows,).
    """
    rows = len(timeline.raw_op)
    # Missed frees take effect where the address was reused.
    change = np.where(is_void, 0, timeline.event_bytes)
    died = lives.died[lives.died != NEVER]
    lost = timeline.event_bytes[died] > 0
    np.subtract.at(change, died[lost], lives.size_bytes[lives.died != NEVER][lost])
    total = start_bytes + np.cumsum(change + extra)
    counter = np.concatenate([[start_bytes], total])

    # A row's own events are those inside it or, for memory between operators, its allocations.
    is_own = timeline.event_is_inside | (timeline.event_bytes > 0)
    is_own &= timeline.event_op != NONE
    own = np.flatnonzero(is_own)
    own_op = timeline.event_op[own]
    first = np.searchsorted(timeline.event_op, np.arange(rows), side="left")
    before = counter[first] + relief
    peak = before.copy()
    np.maximum.at(peak, own_op, total[own])

    is_temporary = np.zeros(len(lives.born), dtype=np.bool_)
    candidates = np.flatnonzero((lives.born != NONE) & (lives.died != NEVER))
    born, died = lives.born[candidates], lives.died[candidates]
    is_temporary[candidates] = (
        (timeline.event_op[born] == timeline.event_op[died])
        & timeline.event_is_inside[born]
        & timeline.event_is_inside[died]
    )
    return Counter(peak, before, is_temporary)


def own_events(time_ns: Ints, address: Ints, size_bytes: Ints, total: Ints, alive_address: Ints) -> Bools:
    """Selects the allocator's own events, each once.

    Mapped files and shared memory report events too, but the allocator does not count them: their events carry a count
    of 0, which the allocator's own events have only when its last block is freed.
    A block that was freed and not reallocated is not freed again: a weak reference reports the free and usually the
    allocator does too, or another thread reallocated the block unseen in between. Of both reports of a recorded block's
    free, the allocator's is selected; there is none if another thread dropped the last reference, such as a thread of
    gloo that held the tensors of a collective.

    Args:
        time_ns: Time of each event. Shape (events,).
        address: Their addresses.
        size_bytes: Their sizes, negative for frees.
        total: The allocator's count after each event; -1 where not reported.
        alive_address: Allocator blocks known to be alive before the first event.
    """
    order = np.lexsort((time_ns, address))
    ordered, is_allocating = address[order], size_bytes[order] > 0
    is_counted, is_reported = total[order] != 0, total[order] >= 0
    is_first = np.ones(len(order), dtype=np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    ends_own_taking = np.zeros(len(order), dtype=np.bool_)
    ends_own_taking[1:] = (is_allocating & is_counted)[:-1] & ~is_first[1:]
    is_told_again = np.zeros(len(order), dtype=np.bool_)
    is_told_again[1:] = ends_own_taking[:-1] & ~is_reported[:-1] & is_reported[1:] & ~is_allocating[1:] & ~is_first[1:]
    is_whole = is_reported.copy()
    is_whole[1:] |= size_bytes[order][1:] == -size_bytes[order][:-1]  # else the storage was resized since
    ends_own_taking &= is_whole
    ends_own_taking[:-1] &= ~is_told_again[1:]
    ends_own_taking |= is_told_again
    ends_older = is_first & (is_counted | np.isin(ordered, alive_address))
    is_own = np.empty(len(order), dtype=np.bool_)
    is_own[order] = np.where(is_allocating, is_counted, ends_own_taking | ends_older)
    return is_own


def outside_events(events: dict[str, Ints], alive: dict[str, Ints], *, is_native: bool) -> Bools:
    """Selects the events of memory that counts although torch's allocator, which reports the others, does not own it.

    They are reported by weak references, without the allocator's count, like some frees of its own memory: only where
    a reference reported the allocation, too, or the block was stated as such (with negative bytes) before the events.

    Args:
        events: Address, size and count of each, by column. Shape (events,).
        alive: Address and bytes of the blocks known to be alive before the first event.
        is_native: The allocator reports the others; else references report all.
    """
    address, size_bytes = events["address"], events["size_bytes"]
    is_unreported = (events["total"] < 0) & (size_bytes != 0) & is_native
    stated = alive["address"][alive["size_bytes"] < 0]
    found: Bools = is_unreported & np.isin(address, np.concatenate([address[is_unreported & (size_bytes > 0)], stated]))
    return found


def with_outside(size_bytes: Ints, total: Ints, is_outside: Bools, before: int) -> Ints:
    """Returns the count after each event with what counts besides the allocator's memory. Shape (events,).

    Args:
        size_bytes: Size of each event in order of time, negative for frees.
        total: The allocator's count after each event; -1 where not reported.
        is_outside: Events of other memory.
        before: Bytes of other memory before the first event.
    """
    own = np.flatnonzero(~is_outside)
    if (len(own) == len(total) and not before) or not len(own) or total[own[0]] < 0:
        return total
    places = np.searchsorted(own, np.arange(len(total)), side="right") - 1
    carried = np.where(places < 0, total[own[0]] - size_bytes[own[0]], total[own[np.maximum(places, 0)]])
    result: Ints = carried + before + np.cumsum(np.where(is_outside, size_bytes, 0))
    return result
