"""Where the device's memory was when a request failed, and whether anything would have made it fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memprof.policies.allocator.policy import parse_options
from memprof.replay.allocator.events import ALLOCATE, Requests
from memprof.replay.allocator.events import replay as replay_requests
from memprof.replay.allocator.recorded_requests import blocks_in_use, requests_of_trace
from memprof.replay.allocator.rules import Settings, segment_size, settings_from_options
from memprof.trace.schema import NONE, AllocatorEvents, OutOfMemory, Segments
from memprof.trace.store import Trace

#: Memory counts as fragmented if what no request could use is at least this much, and this share of the reserved bytes.
_LEAST_SCATTERED_BYTES = 64 << 20
_LEAST_SCATTERED_SHARE = 0.02


@dataclass(frozen=True)
class Room:
    """The device's memory at the moment of a failed request; the parts sum to ``total_bytes`` where that is known.

    Attributes:
        requested_bytes: Bytes requested.
        used_bytes: In blocks in use, with their rounding.
        scattered_bytes: Free, in segments that are partly in use: no use to a request above the largest hole.
        idle_bytes: In segments that are entirely free: cached, and released before a request fails.
        largest_hole_bytes: The largest of the scattered pieces.
        free_bytes: Free on the device.
        outside_bytes: Held outside torch's allocator: contexts, libraries, other processes; None where unknown.
        total_bytes: Memory of the device; None where unknown.
        fits_after_empty_cache: The request fits in what is free once the cache is released. torch does that itself.
        fits_expandable: The request fits with expandable segments, by replay of all recorded requests; None where they
            were in use.
    """

    requested_bytes: int
    used_bytes: int
    scattered_bytes: int
    idle_bytes: int
    largest_hole_bytes: int
    free_bytes: int
    outside_bytes: int | None
    total_bytes: int | None
    fits_after_empty_cache: bool
    fits_expandable: bool | None

    @property
    def is_fragmented(self) -> bool:
        """Whether scattered memory is why the request failed: it is enough to matter, and would have made it fit."""
        reserved = self.used_bytes + self.scattered_bytes + self.idle_bytes
        is_much = is_much_scattered(self.scattered_bytes, reserved)
        return is_much and not self.fits_after_empty_cache and self.fits_expandable is True

    @property
    def short_bytes(self) -> int:
        """Bytes missing even if all free memory were in one piece; 0 if there were enough."""
        return max(0, self.requested_bytes - self.scattered_bytes - self.idle_bytes - self.free_bytes)


def is_much_scattered(scattered_bytes: int, reserved_bytes: int) -> bool:
    """Whether memory that no request can use in one piece is enough to be called fragmentation."""
    return scattered_bytes >= max(_LEAST_SCATTERED_BYTES, _LEAST_SCATTERED_SHARE * reserved_bytes)


def find_room(trace: Trace, failures: OutOfMemory, row: int) -> Room | None:
    """Returns where memory was; None where the recording does not hold the device's segments and blocks then."""
    events, segments = trace.table(AllocatorEvents), trace.table(Segments)
    places = np.flatnonzero(events.action == "oom")
    if len(places) != len(failures) or not len(segments) or not bool((events.block_bytes != NONE).any()):
        return None
    place = int(places[row])
    if np.char.startswith(events.action[place + 1 :].astype(str), "segment").any():
        return None  # the segments are those of the end, not of then
    requested, free = int(failures.requested_bytes[row]), max(int(failures.free_bytes[row]), 0)
    used = blocks_in_use(events.take(slice(0, place)))
    addresses = np.array(sorted(used), dtype=np.int64)
    sizes = np.array([used[address].size for address in addresses.tolist()], dtype=np.int64)
    scattered = idle = hole = 0
    for start, size in zip(segments.address.tolist(), segments.total_size_bytes.tolist(), strict=True):
        inside = slice(*np.searchsorted(addresses, [start, start + size]).tolist())
        if inside.start == inside.stop:
            idle += size
            continue
        edges = np.concatenate([[start], (addresses[inside] + sizes[inside])])
        gaps = np.concatenate([addresses[inside], [start + size]]) - edges
        scattered += int(gaps.sum())
        hole = max(hole, int(gaps.max()))
    total = int(failures.total_bytes[row])
    reserved = int(segments.total_size_bytes.sum())
    is_expandable = bool(segments.is_expandable.any())
    return Room(
        requested_bytes=requested,
        used_bytes=int(sizes.sum()),
        scattered_bytes=scattered,
        idle_bytes=idle,
        largest_hole_bytes=hole,
        free_bytes=free,
        outside_bytes=None if total == NONE else total - free - reserved,
        total_bytes=None if total == NONE else total,
        fits_after_empty_cache=segment_size(requested) <= free + idle,
        fits_expandable=None if is_expandable else _fits_expandable(trace, failures, row, reserved + free),
    )


def _fits_expandable(trace: Trace, failures: OutOfMemory, row: int, capacity: int) -> bool:
    """Replays all requests up to the failed one with expandable segments, on a device of that capacity."""
    last = int(failures.op_id[row])
    issued = requests_of_trace(trace)
    count = int((issued.op_id < last).sum())
    asked = Requests(
        kind=np.append(issued.requests.kind[:count], np.int8(ALLOCATE)),
        allocation=np.append(issued.requests.allocation[:count], np.int32(len(issued.requests.size))),
        size=np.append(issued.requests.size, int(failures.requested_bytes[row])),
        stream=np.append(issued.requests.stream, 0),
        owner=np.append(issued.requests.owner, np.int32(0)),
    )
    try:
        settings = settings_from_options(parse_options(trace.manifest.machine.allocator_settings))
    except ValueError:
        settings = Settings()
    done = replay_requests(asked, replace(settings, expandable_segments=True, capacity_bytes=capacity))
    return not bool(done.failed().any())
