"""The allocator events of a snapshot's device: its history, and what existed before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.importers.columns import ALLOC, FREE_COMPLETED, FREE_REQUESTED
from memprof.trace.importers.device import DeviceHistory
from memprof.trace.schema import ACTIONS, NONE, AllocatorEvents, Annotations, Ints


@dataclass(frozen=True, eq=False)
class _Before:
    """Blocks that existed before the history, in the order of its first events; each column of shape ``(events,)``.

    Attributes:
        action: Action code: each is allocated, and those that were pending free are freed, too.
        address: First byte.
        requested: Requested bytes.
        allocated: Bytes of the block.
        stack_id: Allocation stack.
    """

    action: Ints
    address: Ints
    requested: Ints
    allocated: Ints
    stack_id: Ints


def _before(device: DeviceHistory) -> _Before:
    entries, lives, blocks = device.entries, device.lives, device.blocks
    old = np.flatnonzero(lives.alloc == NONE)
    # Without addresses, as in profiler traces, there is nothing to record about a block.
    old = old[(lives.block[old] == NONE) | (np.append(blocks.address, NONE)[lives.block[old]] != NONE)]
    block = lives.block[old]
    address = np.append(blocks.address, NONE)[block]
    address[block == NONE] = entries.address[lives.free[old[block == NONE]]]
    # A block that is pending at the end, and that no entry of the history freed, was so from the beginning.
    is_about = np.isin(entries.action, (ALLOC, FREE_REQUESTED, FREE_COMPLETED))
    pending = np.flatnonzero(blocks.is_pending & ~np.isin(blocks.address, entries.address[is_about]))
    stack_ids = np.array([stack.stack_id for stack in blocks.stacks] + [NONE], dtype=np.int64)
    return _Before(
        action=np.repeat([ALLOC, FREE_REQUESTED], [len(old) + len(pending), len(pending)]),
        address=np.concatenate((address, blocks.address[pending], blocks.address[pending])),
        requested=np.concatenate((lives.requested[old], blocks.requested[pending], blocks.requested[pending])),
        allocated=np.concatenate((lives.allocated[old], blocks.size[pending], blocks.size[pending])),
        stack_id=stack_ids[np.concatenate((block, pending, pending))],
    )


def allocator_events(device: DeviceHistory, row_of: Ints) -> AllocatorEvents:
    """Copies the history, after rows without index or operator for the blocks that existed before it.

    Args:
        device: The device.
        row_of: Operator at or before each entry of its history.
    """
    entries, lives, before = device.entries, device.lives, _before(device)
    old = len(before.action)
    streams, pools = np.zeros(old, dtype=np.int64), np.full(old, "", dtype=object)
    if len(device.segments):
        by_address = np.argsort(device.segments.address, kind="stable")
        first = device.segments.address[by_address]
        place = by_address[np.maximum(np.searchsorted(first, before.address, side="right") - 1, 0)]
        streams, pools = device.segments.stream[place], device.segments.segment_pool[place]
    block_bytes = np.append(before.allocated, np.full(len(entries), NONE))
    for ends in (lives.alloc, lives.free):
        block_bytes[old + ends[ends != NONE]] = lives.allocated[ends != NONE]
    count = old + len(entries)
    return AllocatorEvents.of(
        index=np.concatenate((np.full(old, NONE), np.arange(len(entries)))),
        time_us=np.concatenate((np.full(old, np.nan), entries.time_us)),
        device=[device.name] * count,
        action=np.array(ACTIONS, dtype=object)[np.append(before.action, entries.action)],
        address=np.concatenate((before.address, entries.address)),
        size_bytes=np.concatenate((before.requested, entries.size)),
        block_bytes=block_bytes,
        stream=np.concatenate((streams, entries.stream)),
        pool=[*pools.tolist(), *entries.pool],
        op_id=np.concatenate((np.full(old, NONE), row_of)),
        stack_id=[*before.stack_id.tolist(), *(stack.stack_id for stack in entries.stacks)],
        compile_context=[*[""] * old, *entries.compile_context],
        user_metadata=[*[""] * old, *entries.user_metadata],
    )


def annotation_table(device: DeviceHistory) -> Annotations:
    """Pairs the starts and ends of named spans, those inside each other innermost first."""
    spans: list[tuple[str, float, float]] = []
    begun: dict[str, list[float]] = {}
    for one in device.annotations:
        if one.is_start:
            begun.setdefault(one.name, []).append(one.time_us)
        else:
            starts = begun.get(one.name)
            spans.append((one.name, starts.pop() if starts else np.nan, one.time_us))
    spans += [(name, start, np.nan) for name, starts in begun.items() for start in starts]
    return Annotations.of(
        device=[device.name] * len(spans),
        name=[name for name, _, _ in spans],
        start_us=[start for _, start, _ in spans],
        end_us=[end for _, _, end in spans],
    )
