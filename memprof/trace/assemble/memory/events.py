"""Selects, among recorded memory events, those that are one allocation or free of memory that counts."""

from __future__ import annotations

import numpy as np

from memprof.trace.schema import Bools, Ints


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
