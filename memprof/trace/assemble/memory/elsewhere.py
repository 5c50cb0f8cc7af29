"""Accounts for memory the allocator counts without a recorded event: other threads and C++ objects.

Every event carries the allocator's own count. Where the count changes by more or less than the event itself, another
thread allocated or freed memory. That memory becomes storages of its own, so that the replay matches the true count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.assemble.memory.block_lives import BlockLives
from memprof.trace.assemble.memory.missed_frees import reused_ends
from memprof.trace.assemble.timeline import Timeline
from memprof.trace.schema import NONE, Ints

#: Name of these storages.
NAME = "taken by another thread, or held by no Python object"


@dataclass(frozen=True)
class Elsewhere:
    """Storages for memory allocated elsewhere. Shape (storages,) each.

    Attributes:
        size_bytes: Their sizes.
        created: Row during which each appeared; NONE when it existed at the start.
        freed: Row during which each was freed; NONE when it stayed.
        change: Change of the counter at each event. Shape (events,).
        relief: The part freed by the time each row ran, negative. Shape (rows,).
        start_bytes: Bytes before the first event.
        missing_bytes: By how much known memory exceeds the allocator's count at the start; 0 if it does not.
    """

    size_bytes: Ints
    created: Ints
    freed: Ints
    change: Ints
    relief: Ints
    start_bytes: int
    missing_bytes: int

    @classmethod
    def nothing(cls, events: int, rows: int) -> Elsewhere:
        """Returns the account of a recording whose allocator reports no count."""
        none = np.empty(0, dtype=np.int64)
        return cls(none, none, none, np.zeros(events, dtype=np.int64), np.zeros(rows, dtype=np.int64), 0, 0)


def account(timeline: Timeline, lives: BlockLives, totals: Ints) -> Elsewhere:
    """Follows the difference between the allocator's count and the known lives.

    Args:
        timeline: Rows and events.
        lives: Lives of blocks.
        totals: The allocator's count after each event. Shape (events,), at least one.
    """
    known_start = int(lives.size_bytes[lives.born == NONE].sum())
    start = int(totals[0] - timeline.event_bytes[0]) - known_start
    change = np.zeros(len(totals), dtype=np.int64)
    change[1:] = np.diff(totals) - timeline.event_bytes[1:]
    # Known frees do not change the unknown part.
    reused = reused_ends(timeline, lives)
    change -= reused
    relief = np.zeros(len(timeline.raw_op), dtype=np.int64)
    first_event = np.searchsorted(timeline.event_op, np.arange(len(relief)), side="left")
    is_own = (timeline.event_is_inside | (timeline.event_bytes > 0)) & (timeline.event_op != NONE)
    sizes: list[int] = []
    created: list[int] = []
    freed: list[int] = []
    open_units: list[tuple[int, int]] = []  # (bytes, row), the latest last
    if start > 0:
        open_units.append((start, NONE))
    for event in np.flatnonzero(change).tolist():
        amount, row = int(change[event]), int(timeline.event_op[event])
        if amount > 0:
            open_units.append((amount, row))
            continue
        left, passing = -amount, 0
        # Freed while a row ran: gone by then, so the previous row is the last that had it.
        last_seen = row - 1 if is_own[event] else row
        while left and open_units:
            size, since = open_units.pop()
            gone = min(size, left)
            if size > gone:
                open_units.append((size - gone, since))
            left -= gone
            if since == row and is_own[event]:  # a worker thread of the kernel: part of the operator's workspace
                passing += gone
                continue
            if max(last_seen, since) != NONE:  # otherwise it was freed before the first row
                sizes.append(gone)
                created.append(since)
                freed.append(max(last_seen, since))
        change[event] = -passing
        given = amount + left + passing  # memory whose allocation was not seen cannot be freed here
        if is_own[event]:
            relief[row] += given
            change[first_event[row]] += given
        else:
            change[event] += given
    for size, since in open_units:
        sizes.append(size)
        created.append(since)
        freed.append(NONE)
    return Elsewhere(
        size_bytes=np.array(sizes, dtype=np.int64),
        created=np.array(created, dtype=np.int64),
        freed=np.array(freed, dtype=np.int64),
        change=change + np.where(timeline.event_bytes > 0, 0, reused),  # the counter already ends lives at allocations
        relief=relief,
        start_bytes=max(start, 0),
        missing_bytes=max(-start, 0),
    )
