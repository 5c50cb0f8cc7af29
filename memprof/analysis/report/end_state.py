"""A snapshot taken without a history: the contents of its segments, without how they came about."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memprof.json_values import key
from memprof.trace.schema import NONE, AllocatorEvents, Segments, Storages
from memprof.trace.store import Trace

NO_HISTORY = "contains no history of allocations, only the reserved memory at its end"


@dataclass(frozen=True)
class EndState:
    """The segments of a snapshot, in bytes.

    Attributes:
        segments: Number of segments.
        reserved: Bytes of all segments.
        allocated: Blocks in use.
        requested: Requested bytes of those and of pending blocks.
        pending: Pending free (in use by another stream).
        idle: Segments that are entirely free.
        holes: Free bytes in segments with blocks in use.
    """

    segments: int
    reserved: int = field(metadata=key("reserved_bytes"))
    allocated: int = field(metadata=key("allocated_bytes"))
    requested: int = field(metadata=key("requested_bytes"))
    pending: int = field(metadata=key("pending_bytes"))
    idle: int = field(metadata=key("idle_segments_bytes"))
    holes: int = field(metadata=key("holes_bytes"))


def is_end_state_only(trace: Trace) -> bool:
    """Whether a recording contains only the final state of reserved memory, without a history.

    A memory snapshot taken without a history lists what is in use; it contains no free events and no segment events.
    """
    if not len(trace.table(Segments)):
        return False
    freed = trace.columns(Storages, "freed_op_id")["freed_op_id"]
    actions = trace.columns(AllocatorEvents, "action")["action"]
    return bool(np.all(freed == NONE)) and not {"segment_alloc", "segment_map"} & set(actions.distinct.tolist())


def describe_end(segments: Segments) -> EndState:
    """Summarizes segments."""
    free = segments.total_size_bytes - segments.active_size_bytes
    is_idle = segments.active_size_bytes == 0
    return EndState(
        segments=len(segments),
        reserved=int(segments.total_size_bytes.sum()),
        allocated=int(segments.allocated_size_bytes.sum()),
        requested=int(segments.requested_size_bytes.sum()),
        pending=int((segments.active_size_bytes - segments.allocated_size_bytes).sum()),
        idle=int(free[is_idle].sum()),
        holes=int(np.sum(free[~is_idle])),
    )
