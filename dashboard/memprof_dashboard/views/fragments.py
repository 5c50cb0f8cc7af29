"""How a device allocator's segments are filled, and the largest hole in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.schema import NONE, AllocatorEvents, Bools, Ints, Segments
from memprof.trace.store import Trace

#: What gives a block back for good; until then a freed one may await another stream.
_GIVEN_BACK = ("free", "free_completed")
#: Sizes on a device are multiples of this: the smallest block of PyTorch's caching allocator.
_ROUNDING = 512


@dataclass(frozen=True, eq=False)
class Fragments:
    """Segments, the lowest address first; arrays of shape ``(segments,)``.

    Attributes:
        segments: The segments of the allocator's snapshot.
        allocated: Bytes in use.
        awaiting: Bytes that were freed and await another stream.
        free: Bytes reserved that nobody holds.
        hole: The largest hole in each, ``NONE`` where it cannot be told.
        request_bytes: The largest request that failed, 0 where none did.
    """

    segments: Segments
    allocated: Ints
    awaiting: Ints
    free: Ints
    hole: Ints
    request_bytes: int

    @property
    def largest_hole(self) -> int:
        """The largest hole of all that can be told; ``NONE`` where none can."""
        return int(self.hole.max(initial=NONE))

    @property
    def most_hole(self) -> int:
        """What no hole is larger than: where one cannot be told, all that is free in its segment."""
        return int(np.where(self.hole == NONE, self.free, self.hole).max(initial=0))

    @property
    def is_told(self) -> bool:
        """Whether the largest hole of all is known: no segment whose holes are not could have a larger one."""
        return self.largest_hole == self.most_hole


def read_fragments(trace: Trace) -> Fragments:
    """Reads the segments of a recording.

    A hole is what is free between two blocks of a segment. The blocks are those that the allocator's events leave
    alive; a segment's holes are told where these blocks sum to what the snapshot says is in use in it (not where some
    were taken before the recording began), and where it is all free or all used.

    Args:
        trace: The recording; of a job on CPU it has no segments.

    Raises:
        BadInputError: The recording is damaged.
    """
    segments = trace.table(Segments)
    segments = segments.take(np.argsort(segments.address, kind="stable"))
    allocated, total = segments.allocated_size_bytes, segments.total_size_bytes
    awaiting = segments.active_size_bytes - allocated
    free = total - segments.active_size_bytes
    hole = np.where(free == 0, 0, np.where(free == total, total, NONE))
    if not len(segments):
        return Fragments(segments, allocated, awaiting, free, hole, 0)
    events = trace.table(AllocatorEvents)
    address, end = _alive_blocks(events)
    inside = np.searchsorted(segments.address, address, side="right") - 1
    for row in np.flatnonzero(hole == NONE).tolist():
        low, high = int(segments.address[row]), int(segments.address[row] + total[row])
        is_here: Bools = (inside == row) & (end <= high)
        if int((end - address)[is_here].sum()) == segments.active_size_bytes[row]:
            starts = np.concatenate((address[is_here], [high]))
            ends = np.concatenate(([low], end[is_here]))
            hole[row] = int((starts - ends).max())
    failed = events.size_bytes[events.action == "oom"]
    return Fragments(segments, allocated, awaiting, free, hole, int(failed.max(initial=0)))


def _alive_blocks(events: AllocatorEvents) -> tuple[Ints, Ints]:
    """Returns where the blocks that are alive at the end begin and end, by address."""
    kept = np.flatnonzero((events.action == "alloc") | np.isin(events.action.astype(str), _GIVEN_BACK))
    order = kept[np.argsort(events.address[kept], kind="stable")]
    address = events.address[order]
    is_last = np.append(address[1:] != address[:-1], True)[: len(address)]
    rows = order[is_last & (events.action[order] == "alloc")]
    size = -(-events.size_bytes[rows] // _ROUNDING) * _ROUNDING
    return events.address[rows], events.address[rows] + size
