"""The device allocator's counters besides allocated bytes: requested, active and reserved bytes."""

from __future__ import annotations

import numpy as np

from memprof.trace.assemble.devices.allocator_history import block_bytes, pending_bytes, rows_at
from memprof.trace.assemble.memory.block_lives import BlockLives
from memprof.trace.assemble.memory.native_events import DeviceEvents
from memprof.trace.assemble.timeline import Timeline
from memprof.trace.schema import NONE, Ints


def requested_bytes(memory_events: DeviceEvents, lives: BlockLives) -> Ints:
    """Returns the requested bytes of each life; NONE where unknown. Shape (lives,)."""
    requested = np.full(len(lives.born), NONE, dtype=np.int64)
    is_born = lives.born != NONE
    requested[is_born] = memory_events.requested[lives.born[is_born]]
    row = rows_at(memory_events.alive_address, lives.address)
    is_older = ~is_born & (row != NONE)
    requested[is_older] = memory_events.alive_requested[row[is_older]]
    return requested


def reserved_peaks(memory_events: DeviceEvents, timeline: Timeline) -> Ints:
    """Returns the peak reserved bytes while each row ran; NONE where the allocator reports none. Shape (rows,).

    A row that neither allocates nor frees keeps the previous value; rows before the first event get the value before
    that event.
    """
    rows = len(timeline.raw_op)
    is_known = memory_events.reserved != NONE
    if not is_known.any():
        return np.full(rows, NONE, dtype=np.int64)
    peak = np.full(rows, NONE, dtype=np.int64)
    inside = np.flatnonzero(is_known & (timeline.event_op != NONE))
    np.maximum.at(peak, timeline.event_op[inside], memory_events.reserved[inside])
    latest = _latest(memory_events.reserved[inside], timeline.event_op[inside], rows)
    first = int(memory_events.reserved[is_known][0])
    before = np.where(latest == NONE, first, latest)
    return np.maximum(peak, np.concatenate(([first], before[:-1])))


def active_peaks(memory_events: DeviceEvents, timeline: Timeline, allocated: Ints) -> Ints:
    """Returns the peak active bytes (in use, or pending free on another stream) while each row ran. Shape (rows,).

    Args:
        memory_events: The device's events.
        timeline: Rows and events.
        allocated: Peak allocated bytes while each row ran. Shape (rows,).
    """
    history = memory_events.history
    if not len(history):
        return allocated
    event = memory_events.event_of_entry
    taken = np.where(event == NONE, NONE, np.abs(memory_events.size_bytes)[np.maximum(event, 0)])
    pending = pending_bytes(history, block_bytes(history, taken))
    if not pending.any():
        return allocated
    # Bytes pending free while a row allocates its blocks; for a row that allocates nothing, those pending before it.
    rows = np.full(len(history), NONE, dtype=np.int64)
    rows[event != NONE] = timeline.event_op[event[event != NONE]]
    known = np.flatnonzero(rows != NONE)
    latest = _latest(pending[known], np.maximum.accumulate(rows[known]), len(allocated))
    waiting = np.concatenate(([0], np.maximum(latest, 0)[:-1]))
    peak = allocated + waiting
    allocations = known[history.is_allocating[known]]
    after = _allocated_after(memory_events)[event[allocations]] + pending[allocations]
    own = np.full(len(allocated), NONE, dtype=np.int64)
    np.maximum.at(own, rows[allocations], after)
    return np.where(own == NONE, peak, np.maximum(own, allocated))


def _allocated_after(memory_events: DeviceEvents) -> Ints:
    """Returns the allocated bytes after each event: the allocator's own counter, or the running sum without one."""
    summed = int(memory_events.alive_bytes.sum()) + np.cumsum(memory_events.size_bytes)
    return np.where(memory_events.total < 0, summed, memory_events.total)


def _latest(values: Ints, rows: Ints, count: int) -> Ints:
    """Returns the last reported value up to each row; NONE before the first. Rows must be non-decreasing."""
    known = np.full(count, NONE, dtype=np.int64)
    known[rows] = values
    place = np.maximum.accumulate(np.where(known == NONE, NONE, np.arange(count)))
    return np.where(place == NONE, NONE, known[place])
