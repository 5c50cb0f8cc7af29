"""Reads recordings of a device: their peak, and whether the allocator's model repeats them."""

from __future__ import annotations

import dataclasses

import numpy as np

from memprof.replay.allocator.blocks import ALLOCATED, PENDING
from memprof.replay.allocator.rules import SMALL_REQUEST_BYTES, Settings, rounded_request
from memprof.replay.allocator.window import BlockMap, Range
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE, AllocatorEvents, Segments
from memprof.trace.step import Step
from tests.replay.allocator.recorded import Comparison, compare


def device_peak(step: Step, device: str) -> int:
    """Returns the most bytes alive on a device; what operators hold for themselves is taken to be there."""
    storages = step.storages
    own = storages.replace(allocated_bytes=np.where(storages.device == device, storages.allocated_bytes, 0))
    return int(live_bytes(dataclasses.replace(step, storages=own)).during.max(initial=0))


def compare_recording(
    events: AllocatorEvents, segments: Segments, settings: Settings, alive_bytes: int
) -> tuple[Comparison, int]:
    """Compares the model with the recorded events of one device.

    Args:
        events: The events; what was in use before the first comes first, without an index.
        segments: The segments after the last.
        settings: The allocator's options.
        alive_bytes: Bytes of the storages that are left at the end.

    Returns:
        The comparison, and how many things differ. The final blocks are made up from the events and the gaps between
        them, so of them only the bytes of the storages count.

    Raises:
        ValueError: The recording has no allocator events or no segments.
    """
    is_event = events.index != NONE
    if not is_event.any() or not len(segments):
        raise ValueError("it holds no history of the allocator")
    end = blocks_at_end(events, segments, settings)
    compared = compare(events.take(is_event), end, settings)
    differ = sum(mismatch.event < is_event.sum() for mismatch in compared.mismatches)
    return compared, differ + int(alive_bytes != segments.allocated_size_bytes.sum())


def blocks_at_end(events: AllocatorEvents, segments: Segments, settings: Settings) -> BlockMap:
    """Returns the segments at the end, and the blocks that the events leave in use."""
    ranges = _ranges(segments)
    lives: dict[int, tuple[int, int]] = {}
    rows = zip(events.action.tolist(), events.address.tolist(), events.size_bytes.tolist(), strict=True)
    for action, address, size in rows:
        if action == "alloc":
            lives[address] = (size, ALLOCATED)
        elif action == "free_requested" and address in lives:
            lives[address] = (lives[address][0], PENDING)
        elif action in ("free", "free_completed"):
            lives.pop(address, None)
    address = np.array(sorted(lives), dtype=np.int64)
    requested = np.array([lives[one][0] for one in address.tolist()], dtype=np.int64)
    size = np.array([rounded_request(int(one), settings.divisions) for one in requested], dtype=np.int64)
    for memory in ranges:
        first, last = address.searchsorted([memory.address, memory.address + memory.size])
        behind = np.append(address[first + 1 : last], memory.address + memory.size)[: last - first]
        rest = behind - address[first:last] - size[first:last]
        # Of a large segment, what is left behind a block and is no larger than this is not cut off.
        is_part = (rest <= SMALL_REQUEST_BYTES) & (not (memory.is_small or memory.is_expandable))
        size[first:last] += np.where(is_part, rest, 0)
    state = np.array([lives[one][1] for one in address.tolist()], dtype=np.int64)
    return BlockMap(ranges, address, size, requested, state)


def _ranges(segments: Segments) -> list[Range]:
    pools = {"": 0}
    return [
        Range(address, size, stream, pools.setdefault(str(pool or ""), len(pools)), kind == "small", bool(expandable))
        for address, size, stream, pool, kind, expandable in zip(
            segments.address.tolist(),
            segments.total_size_bytes.tolist(),
            segments.stream.tolist(),
            segments.segment_pool.tolist(),
            segments.segment_type.tolist(),
            segments.is_expandable.tolist(),
            strict=True,
        )
    ]
