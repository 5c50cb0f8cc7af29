"""The tables of a device's allocator: its events, and its counters besides allocated bytes."""

from __future__ import annotations

import numpy as np

from memprof.trace.assemble import texts
from memprof.trace.assemble.allocator_history import block_bytes, pending_bytes
from memprof.trace.assemble.memory.block_lives import BlockLives
from memprof.trace.assemble.memory.native_events import DeviceEvents
from memprof.trace.assemble.recording import Recording
from memprof.trace.assemble.timeline import Timeline, first_rows
from memprof.trace.files.spool import Spool
from memprof.trace.schema import ACTIONS, NONE, AllocatorEvents, DeviceMemory, HostHeap, Ints


def allocator_events(recording: Recording) -> AllocatorEvents:
    """Builds the table of allocator events.

    Sizes are requested bytes where known. For a device, blocks already in use come first, without an index.
    """
    memory_events, timeline = recording.memory_events, recording.timeline
    return _history(memory_events, timeline) if len(memory_events.history) else _from_events(memory_events, timeline)


def _from_events(memory_events: DeviceEvents, timeline: Timeline) -> AllocatorEvents:
    total = len(timeline.event_bytes)
    size = np.abs(timeline.event_bytes)
    return AllocatorEvents.of(
        index=np.arange(total),
        time_us=timeline.event_time_ns / 1000,
        device=np.full(total, memory_events.device, dtype=np.object_),
        action=np.where(timeline.event_bytes > 0, "alloc", "free").astype(np.object_),
        address=timeline.event_address,
        size_bytes=np.where(memory_events.requested == NONE, size, memory_events.requested),
        op_id=timeline.event_op,
    )


def _history(memory_events: DeviceEvents, timeline: Timeline) -> AllocatorEvents:
    history = memory_events.history
    before = history.alive
    older = len(before["address"])
    count = older + len(history)
    return AllocatorEvents.of(
        index=np.concatenate((np.full(older, NONE), np.arange(len(history)))),
        time_us=np.concatenate((np.full(older, np.nan), history.time_us.astype(np.float64))),
        device=np.full(count, memory_events.device, dtype=np.object_),
        action=np.array(["alloc"] * older + [ACTIONS[code] for code in history.action.tolist()], dtype=np.object_),
        address=np.concatenate((before["address"], history.address)),
        size_bytes=np.concatenate((before["requested_bytes"], history.size_bytes)),
        stream=np.concatenate((before["stream"], history.stream)),
        pool=np.array(["" if pool == 0 else str(pool) for pool in (0,) * older + tuple(history.pool.tolist())], object),
        op_id=np.concatenate((np.full(older, NONE), _rows(memory_events, timeline))),
    )


def _rows(memory_events: DeviceEvents, timeline: Timeline) -> Ints:
    """Returns the row each history entry belongs to: that of the event reporting it, else that of the previous event.

    A segment belongs to the event after it, which needed it.
    """
    event = memory_events.event_of_entry
    count = len(event)
    row = np.full(count, NONE, dtype=np.int64)
    row[event != NONE] = timeline.event_op[event[event != NONE]]
    place = np.arange(count)
    before = np.maximum.accumulate(np.where(event != NONE, place, NONE))
    behind = count - 1 - np.maximum.accumulate(np.where(event[::-1] != NONE, place, NONE))[::-1]
    has_behind = behind < count
    source = np.where(memory_events.history.is_growth & has_behind, np.minimum(behind, count - 1), before)
    is_open = (event == NONE) & (source != NONE)
    row[is_open] = row[source[is_open]]
    return row


def device_samples(spool: Spool) -> DeviceMemory:
    """Builds the table of whole-device samples over the whole recording."""
    samples = spool.columns("device_memory")
    names = texts.listed(spool, "devices")
    return DeviceMemory.of(
        time_us=samples["time_ns"] / 1000,
        device=np.array([names[number] for number in samples["device"].tolist()], dtype=np.object_),
        total_bytes=samples["total_bytes"],
        used_bytes=samples["used_bytes"],
        process_bytes=samples["process_bytes"],
        reserved_bytes=samples["reserved_bytes"],
        pinned_bytes=samples["pinned_bytes"],
    )


def heap_samples(spool: Spool) -> HostHeap:
    """Builds the table of the process's heaps over the whole recording."""
    samples = spool.columns("heap")
    return HostHeap.of(
        time_us=samples["time_ns"] / 1000,
        used_bytes=samples["used_bytes"],
        free_bytes=samples["free_bytes"],
        python_blocks=samples["blocks"],
        held_bytes=samples["held_bytes"],
    )


def requested_bytes(memory_events: DeviceEvents, lives: BlockLives) -> Ints:
    """Returns the requested bytes of each life; NONE where unknown. Shape (lives,)."""
    requested = np.full(len(lives.born), NONE, dtype=np.int64)
    is_born = lives.born != NONE
    requested[is_born] = memory_events.requested[lives.born[is_born]]
    row = first_rows(memory_events.alive_address, lives.address)
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
    # The allocator's own counter, or the running sum without one.
    summed = int(memory_events.alive_bytes.sum()) + np.cumsum(memory_events.size_bytes)
    allocated_after = np.where(memory_events.total < 0, summed, memory_events.total)
    after = allocated_after[event[allocations]] + pending[allocations]
    own = np.full(len(allocated), NONE, dtype=np.int64)
    np.maximum.at(own, rows[allocations], after)
    return np.where(own == NONE, peak, np.maximum(own, allocated))


def _latest(values: Ints, rows: Ints, count: int) -> Ints:
    """Returns the last reported value up to each row; NONE before the first. Rows must be non-decreasing."""
    known = np.full(count, NONE, dtype=np.int64)
    known[rows] = values
    place = np.maximum.accumulate(np.where(known == NONE, NONE, np.arange(count)))
    return np.where(place == NONE, NONE, known[place])
