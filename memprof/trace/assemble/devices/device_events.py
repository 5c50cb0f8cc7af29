"""Builds the tables of a device's allocator: its events (recorded, or its own history) and its samples."""

from __future__ import annotations

import numpy as np

from memprof.trace.assemble import texts
from memprof.trace.assemble.memory.native_events import DeviceEvents
from memprof.trace.assemble.recording import Recording
from memprof.trace.assemble.timeline import Timeline
from memprof.trace.files.spool import Spool
from memprof.trace.schema import ACTIONS, NONE, AllocatorEvents, DeviceMemory, Ints


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
