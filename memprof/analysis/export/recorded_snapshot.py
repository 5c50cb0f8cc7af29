"""Exports an imported snapshot as it was recorded: its own addresses, segments and events."""

from __future__ import annotations

import numpy as np

from memprof.replay.allocator.block_sizes import blocks_in_use
from memprof.replay.allocator.blocks import PENDING as PENDING_BLOCK
from memprof.trace.exporters.snapshot import ACTIVE, INACTIVE, PENDING, Blocks, DeviceSnapshot, EventRows, History
from memprof.trace.files.coding.coded import Coded
from memprof.trace.schema import NONE, AllocatorEvents, Annotations, Segments
from memprof.trace.store import Trace

#: Events written at a time.
_CHUNK = 1 << 16


def recorded_snapshot(trace: Trace) -> DeviceSnapshot | None:
    """Returns an imported snapshot with its recorded events; None for recordings without block sizes and segments.

    Args:
        trace: The recording of one rank.
    """
    events, segments = trace.table(AllocatorEvents), trace.table(Segments)
    if not len(segments) or not bool((events.block_bytes != NONE).any()):
        return None
    device = str(segments.device[0])
    history = events.take(events.index != NONE)
    return DeviceSnapshot(
        number=int(device.rpartition(":")[2]) if ":" in device else 0,
        history=_history(history),
        segments=segments,
        blocks=_blocks(events, segments),
        annotations=trace.table(Annotations),
    )


def _history(events: AllocatorEvents) -> History:
    action, note = Coded.of(events.action), Coded.of(events.user_metadata)
    context, pool = Coded.of(events.compile_context), Coded.of(events.pool)
    rows = EventRows(
        action=action.codes,
        address=events.address,
        size=events.size_bytes,
        stream=events.stream,
        time_us=events.time_us,
        stack_id=events.stack_id,
        note=note.codes,
        context=context.codes,
        pool=pool.codes,
    )
    return History(
        actions=action.distinct.tolist(),
        notes=note.distinct.tolist(),
        contexts=context.distinct.tolist(),
        pools=pool.distinct.tolist(),
        chunks=(rows.take(slice(low, low + _CHUNK)) for low in range(0, len(events), _CHUNK)),
    )


def _blocks(events: AllocatorEvents, segments: Segments) -> Blocks:
    """Returns the blocks of the segments: those in use after the last event, and what is free between them."""
    used = blocks_in_use(events)
    rows: list[tuple[int, int, int, int, str, int]] = []
    addresses = np.array(sorted(used), dtype=np.int64)
    for row, (start, total) in enumerate(
        zip(segments.address.tolist(), segments.total_size_bytes.tolist(), strict=True)
    ):
        position, end = start, start + total
        for address in addresses[slice(*np.searchsorted(addresses, [start, end]))].tolist():
            size, requested, state, stack = used[address]
            if address > position:
                rows.append((row, position, address - position, 0, INACTIVE, NONE))
            rows.append((row, address, size, requested, PENDING if state == PENDING_BLOCK else ACTIVE, stack))
            position = address + size
        if position < end:
            rows.append((row, position, end - position, 0, INACTIVE, NONE))
    return Blocks(
        segment=np.array([one[0] for one in rows], dtype=np.int64),
        address=np.array([one[1] for one in rows], dtype=np.int64),
        size=np.array([one[2] for one in rows], dtype=np.int64),
        requested=np.array([one[3] for one in rows], dtype=np.int64),
        state=np.array([one[4] for one in rows], dtype=object),
        stack_id=np.array([one[5] for one in rows], dtype=np.int64),
    )
