"""Chooses, among the memory events heard, those that are one taking or one giving back of the allocator's memory."""

from __future__ import annotations

import numpy as np

from memprof.trace.schema import Bools, Ints


def own_events(time_ns: Ints, address: Ints, size_bytes: Ints, total: Ints, alive_address: Ints) -> Bools:
    """Tells the allocator's own events, each once, from what else was heard.

    Files and shared memory that torch maps report themselves, too, but the allocator counts none of it: their
    events stand beside a count of 0, where the allocator's own can stand only when its last block goes.
    What was freed and not taken since is not freed again: the end of memory older than the recorder is told by a
    weak reference and sometimes by the allocator, too; or another thread took the block in between, unheard.

    Args:
        time_ns: Time of each event. Shape (events,).
        address: Their addresses.
        size_bytes: Their sizes, negative for frees.
        total: The allocator's count after each, -1 where it was not told.
        alive_address: Blocks of the allocator's known to be alive before the first event.
    """
    order = np.lexsort((time_ns, address))
    ordered, is_taking = address[order], size_bytes[order] > 0
    is_counted = total[order] != 0
    is_first = np.ones(len(order), dtype=np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    ends_own_taking = np.zeros(len(order), dtype=np.bool_)
    ends_own_taking[1:] = (is_taking & is_counted)[:-1] & ~is_first[1:]
    ends_older = is_first & (is_counted | np.isin(ordered, alive_address))
    is_own = np.empty(len(order), dtype=np.bool_)
    is_own[order] = np.where(is_taking, is_counted, ends_own_taking | ends_older)
    return is_own
