"""A snapshot's segments, examined, and its allocator events: its history, and what existed before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from memprof.trace.importers.columns import ALLOC, FREE_COMPLETED, FREE_REQUESTED, Entries, check_dicts
from memprof.trace.importers.device import DeviceHistory
from memprof.trace.schema import ACTIONS, NONE, AllocatorEvents, Annotations, Ints, Segments

#: The keys that each part of a snapshot has, up to torch 2.15. All are read but the frames of segments, also those of a
#: forward: where one was allocated is where its first block was.
KEYS = {
    "snapshot": {
        "segments", "device_traces", "allocator_settings", "external_annotations", "host_segments", "host_traces"
    },
    "segments": {
        "device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream", "segment_type",
        "segment_pool_id", "is_expandable", "frames", "forward_frames", "blocks",
    },
    "blocks": {"address", "size", "requested_size", "state", "frames", "forward_frames", "history"},
    "entries": {
        "action", "addr", "device_free", "size", "stream", "time_us", "frames", "forward_frames", "compile_context",
        "user_metadata", "internal_metadata", "pool_id", "category",
    },
    "frames": {"filename", "line", "name", "fx_node_op", "fx_node_name", "fx_original_trace"},
}  # fmt: skip

#: No device has as much memory: 1 TiB.
_MOST_BYTES = 1 << 40


def _before(device: DeviceHistory) -> tuple[Ints, ...]:
    """Returns the first events of blocks that existed before the history, each of shape ``(events,)``.

    They are action codes (each is allocated, and those that were pending free are freed, too), addresses, requested and
    allocated bytes, and stacks of the allocations.
    """
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
    twice = (
        np.concatenate((first, second[pending], second[pending]))
        for first, second in (
            (address, blocks.address),
            (lives.requested[old], blocks.requested),
            (lives.allocated[old], blocks.size),
        )
    )
    action = np.repeat([ALLOC, FREE_REQUESTED], [len(old) + len(pending), len(pending)])
    return action, *twice, stack_ids[np.concatenate((block, pending, pending))]


def allocator_events(device: DeviceHistory, row_of: Ints) -> AllocatorEvents:
    """Copies the history, after rows without index or operator for the blocks that existed before it.

    Args:
        device: The device.
        row_of: Operator at or before each entry of its history.
    """
    entries, lives = device.entries, device.lives
    action, address, requested, allocated, stack_id = _before(device)
    old = len(action)
    streams, pools = np.zeros(old, dtype=np.int64), np.full(old, "", dtype=object)
    if len(device.segments):
        by_address = np.argsort(device.segments.address, kind="stable")
        first = device.segments.address[by_address]
        place = by_address[np.maximum(np.searchsorted(first, address, side="right") - 1, 0)]
        streams, pools = device.segments.stream[place], device.segments.segment_pool[place]
    block_bytes = np.append(allocated, np.full(len(entries), NONE))
    for ends in (lives.alloc, lives.free):
        block_bytes[old + ends[ends != NONE]] = lives.allocated[ends != NONE]
    count = old + len(entries)
    pool, context, metadata, internal = (np.full(count, "", dtype=object) for _ in range(4))
    pool[:old], pool[old:] = pools, entries.pool
    context[old:], metadata[old:] = entries.compile_context, entries.user_metadata
    internal[[old + row for row in entries.internal_metadata]] = list(entries.internal_metadata.values())
    return AllocatorEvents.of(
        index=np.concatenate((np.full(old, NONE), np.arange(len(entries)))),
        time_us=np.concatenate((np.full(old, np.nan), entries.time_us)),
        device=np.full(count, device.name, dtype=object),
        action=np.array(ACTIONS, dtype=object)[np.append(action, entries.action)],
        address=np.concatenate((address, entries.address)),
        size_bytes=np.concatenate((requested, entries.size)),
        block_bytes=block_bytes,
        stream=np.concatenate((streams, entries.stream)),
        pool=pool,
        op_id=np.concatenate((np.full(old, NONE), row_of)),
        stack_id=[*stack_id.tolist(), *(stack.stack_id for stack in entries.stacks)],
        compile_context=context,
        user_metadata=metadata,
        internal_metadata=internal,
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


def examine_segments(raw: list[Any]) -> tuple[list[Any], tuple[str, ...]]:
    """Returns the distinct segments, and sentences on those that repeat, overlap, or have an impossible size.

    Args:
        raw: The segments of one device, as loaded.

    Raises:
        BadInputError: A segment's blocks are not a list of dicts.
    """
    seen: dict[Any, Any] = {}
    repeated, impossible, uneven = 0, 0, 0
    for segment in raw:
        address, size = segment.get("address"), segment.get("total_size")
        if type(address) is int and address in seen:
            repeated += 1
            continue
        seen[address if type(address) is int else id(segment)] = segment
        if type(size) is int and not 0 <= size <= _MOST_BYTES:
            impossible += 1
        blocks = segment.get("blocks", [])
        check_dicts(blocks, "the blocks of a segment")
        sizes = [block.get("size", 0) for block in blocks]
        if blocks and type(size) is int and all(type(one) is int for one in sizes) and sum(sizes) != size:
            uneven += 1
    kept = list(seen.values())
    overlapping = _overlapping(kept)
    remarks = [
        f"{_count(repeated)} at the address of another one: left out." if repeated else "",
        f"{_count(impossible)} of an impossible size; reserved bytes may be off." if impossible else "",
        f"{_count(uneven)} whose blocks do not add up to its size." if uneven else "",
        f"{_count(overlapping)} that overlaps the one before it." if overlapping else "",
    ]
    return kept, tuple(remark for remark in remarks if remark)


def with_pools(entries: Entries, segments: Segments) -> Entries:
    """Returns entries with the memory pool of their segment, which only the latest torch writes to each entry."""
    if any(entries.pool) or not len(segments) or not any(segments.segment_pool.tolist()):
        return entries
    order = np.argsort(segments.address, kind="stable")
    first = segments.address[order]
    place = order[np.maximum(np.searchsorted(first, entries.address, side="right") - 1, 0)]
    inside = (entries.address >= segments.address[place]) & (
        entries.address < segments.address[place] + segments.total_size_bytes[place]
    )
    pools = np.where(inside, segments.segment_pool[place], "")
    return dataclasses.replace(entries, pool=pools.tolist())


def unknown_keys(**found: Iterable[Any]) -> tuple[str, ...]:
    """Returns a sentence on keys that torch up to 2.15 does not write; none where all are known.

    Args:
        found: Keys of each part of a snapshot, by the names of ``KEYS``.
    """
    new = {key for what, keys in found.items() for key in keys if type(key) is str and key not in KEYS[what]}
    return (f"keys unknown to this version were left out: {', '.join(sorted(new))[:200]}.",) if new else ()


def _overlapping(segments: list[Any]) -> int:
    spans = sorted(
        (segment["address"], segment["total_size"])
        for segment in segments
        if type(segment.get("address")) is int and type(segment.get("total_size")) is int
    )
    return sum(first + size > second for (first, size), (second, _) in pairwise(spans))


def _count(number: int) -> str:
    return f"{number:,} segment" if number == 1 else f"{number:,} segments"
