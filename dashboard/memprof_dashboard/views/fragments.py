"""Usage of a device allocator's segments, and the largest hole in each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.schema import NONE, AllocatorEvents, Bools, Ints, Segments
from memprof.trace.store import Trace

#: Events that finally free a block; until then a freed one may be in use by another stream.
_GIVEN_BACK = ("free", "free_completed")
#: Sizes on a device are multiples of this: the smallest block of PyTorch's caching allocator.
_ROUNDING = 512


@dataclass(frozen=True, eq=False)
class Fragments:
    """Segments, the lowest address first; arrays of shape ``(segments,)``.

    Attributes:
        segments: The segments of the allocator's snapshot.
        allocated: Bytes in use.
        awaiting: Bytes pending free (in use by another stream).
        free: Bytes reserved but unallocated.
        hole: The largest hole in each, ``NONE`` where unknown.
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
        """The largest known hole; ``NONE`` where none is known."""
        return int(self.hole.max(initial=NONE))

    @property
    def most_hole(self) -> int:
        """Upper bound of the largest hole: where a hole is unknown, all free bytes of its segment."""
        return int(np.where(self.hole == NONE, self.free, self.hole).max(initial=0))

    @property
    def is_told(self) -> bool:
        """Whether the largest hole is known: no segment with unknown holes could have a larger one."""
        return self.largest_hole == self.most_hole


def read_fragments(trace: Trace) -> Fragments:
    """Reads the segments of a recording.

    A hole is what is free between two blocks of a segment. The blocks are those that the allocator's events leave
    alive; a segment's holes are known where these blocks sum to what the snapshot says is in use in it (not where some
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
    """Returns the start and end addresses of the blocks alive at the end, by address."""
    kept = np.flatnonzero((events.action == "alloc") | np.isin(events.action.astype(str), _GIVEN_BACK))
    order = kept[np.argsort(events.address[kept], kind="stable")]
    address = events.address[order]
    is_last = np.append(address[1:] != address[:-1], True)[: len(address)]
    rows = order[is_last & (events.action[order] == "alloc")]
    size = -(-events.size_bytes[rows] // _ROUNDING) * _ROUNDING
    return events.address[rows], events.address[rows] + size
