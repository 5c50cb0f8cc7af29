"""Summary figures of a snapshot: entries by action, end state, peaks in the window, and completeness."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from memprof.json_values import Json, to_json
from memprof.trace.importers.allocations import Allocations, Reserved
from memprof.trace.importers.columns import OOM, Blocks, Entries
from memprof.trace.schema import ACTIONS, NONE, Segments


@dataclass(frozen=True)
class OutOfMemory:
    """A failed memory request.

    Attributes:
        entry: Its index in the history.
        requested_bytes: Requested bytes.
        free_bytes: Free bytes of the device.
        source: The caller as file, line and function; "" without a stack.
    """

    entry: int
    requested_bytes: int
    free_bytes: int
    source: str


@dataclass(frozen=True)
class DeviceFacts:
    """One device of a snapshot; bytes are requested bytes where the name says so, else allocated bytes.

    Attributes:
        device: Its name, such as ``cuda:0``.
        entries: Entries of its history.
        actions: Number of entries by action.
        segments: Segments at the end.
        expandable_segments: How many of them are expandable.
        blocks: Blocks in them, in use or not.
        end_requested_bytes: Requested bytes in use at the end.
        end_allocated_bytes: Allocated bytes in use at the end.
        end_active_bytes: The same, including blocks pending free.
        end_active_requested_bytes: Requested bytes of those.
        end_reserved_bytes: Bytes of all segments.
        start_requested_bytes: Requested bytes in use before the first entry, computed backwards from the end.
        start_reserved_bytes: Bytes of segments before the first entry.
        peak_requested_bytes: Peak requested bytes in the window.
        peak_reserved_bytes: Peak reserved bytes in the window.
        history_complete: Recording began before the first allocation: nothing was allocated at the start.
        has_timeline: There is a history: at least two entries.
        out_of_memory: Failed requests.
    """

    device: str
    entries: int
    actions: dict[str, int]
    segments: int
    expandable_segments: int
    blocks: int
    end_requested_bytes: int
    end_allocated_bytes: int
    end_active_bytes: int
    end_active_requested_bytes: int
    end_reserved_bytes: int
    start_requested_bytes: int
    start_reserved_bytes: int
    peak_requested_bytes: int
    peak_reserved_bytes: int
    history_complete: bool
    has_timeline: bool
    out_of_memory: tuple[OutOfMemory, ...]

    def to_json(self) -> Json:
        """Returns the figures as JSON containers."""
        found: Json = to_json(self)
        if self.end_reserved_bytes < 0:  # not reported
            found |= dict.fromkeys(("end_reserved_bytes", "start_reserved_bytes", "peak_reserved_bytes"))
        return found


def find_facts(
    device: str,
    entries: Entries,
    segments: Segments,
    blocks: Blocks,
    all_blocks: int,
    lives: Allocations,
    reserved: Reserved,
) -> DeviceFacts:
    """Computes the figures of one device."""
    end = int(blocks.requested[~blocks.is_pending].sum())
    change = np.zeros(len(entries) + 1, dtype=np.int64)
    born, freed = lives.alloc != NONE, lives.free != NONE
    np.add.at(change, lives.alloc[born] + 1, lives.requested[born])
    np.subtract.at(change, lives.free[freed] + 1, lives.requested[freed])
    change[0] = lives.requested[~born].sum()
    held = np.cumsum(change)
    counted = Counter(entries.action.tolist())
    actions = {name: counted[code] for code, name in enumerate(ACTIONS) if counted[code]} | entries.unknown
    start = int(held[0])
    return DeviceFacts(
        device=device,
        entries=len(entries) + sum(entries.unknown.values()),
        actions=actions,
        segments=len(segments),
        expandable_segments=int(segments.is_expandable.sum()),
        blocks=all_blocks,
        end_requested_bytes=end,
        end_allocated_bytes=int(blocks.size[~blocks.is_pending].sum()),
        end_active_bytes=int(blocks.size.sum()),
        end_active_requested_bytes=int(blocks.requested.sum()),
        end_reserved_bytes=reserved.end,
        start_requested_bytes=start,
        start_reserved_bytes=reserved.start,
        peak_requested_bytes=int(held.max()),
        peak_reserved_bytes=reserved.peak,
        history_complete=len(entries) > 1 and start == 0 and reserved.start <= 0,
        has_timeline=len(entries) > 1,
        out_of_memory=tuple(
            OutOfMemory(row, int(entries.size[row]), int(entries.address[row]), entries.stacks[row].place)
            for row in np.flatnonzero(entries.action == OOM).tolist()
        ),
    )
