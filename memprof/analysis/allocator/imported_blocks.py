"""Imports files with the block sizes of the allocator's model: blocks that it does not split are larger than asked."""

from __future__ import annotations

import numpy as np

from memprof.policies.allocator.policy import parse_options
from memprof.replay.allocator.blocks import ALLOCATED, PENDING
from memprof.replay.allocator.recorded_requests import block_sizes
from memprof.replay.allocator.rules import Settings, settings_from_options
from memprof.replay.allocator.window import BlockMap, Range
from memprof.trace.importers.columns import Blocks, Entries
from memprof.trace.schema import ACTIONS, AllocatorEvents, Ints, Segments


def imported_block_sizes(entries: Entries, blocks: Blocks, segments: Segments, options: str) -> Ints:
    """Returns the block size of each entry that allocates or frees, 0 where unknown, shape ``(entries,)``.

    Args:
        entries: The history of one device.
        blocks: Its blocks in use at the end.
        segments: Its segments at the end.
        options: The allocator's options; ignored where torch would not accept them.
    """
    return block_sizes(*blocks_at_end(entries, blocks, segments, options))


def blocks_at_end(
    entries: Entries, blocks: Blocks, segments: Segments, options: str
) -> tuple[AllocatorEvents, BlockMap, Settings]:
    """Returns the events of a device, its blocks after the last, and the settings; arguments as above."""
    try:
        settings = settings_from_options(parse_options(options))
    except ValueError:
        settings = Settings()
    order = np.argsort(blocks.address, kind="stable")
    ranges = [
        Range(address, size, stream, 0, kind == "small", grows)
        for address, size, stream, kind, grows in zip(
            segments.address.tolist(),
            segments.total_size_bytes.tolist(),
            segments.stream.tolist(),
            segments.segment_type.tolist(),
            segments.is_expandable.tolist(),
            strict=True,
        )
    ]
    end = BlockMap(
        ranges,
        blocks.address[order],
        blocks.size[order],
        blocks.requested[order],
        np.where(blocks.is_pending[order], PENDING, ALLOCATED),
    )
    events = AllocatorEvents.of(
        action=np.array(ACTIONS, dtype=object)[entries.action],
        address=entries.address,
        size_bytes=entries.size,
        stream=entries.stream,
    )
    return events, end, settings
