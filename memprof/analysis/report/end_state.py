"""What a snapshot tells that was taken without a history: how much its segments hold, and nothing of how it came."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.schema import NONE, AllocatorEvents, Segments, Storages
from memprof.trace.store import Trace

NO_HISTORY = "holds no history of allocations, only what was reserved at its end"


@dataclass(frozen=True)
class EndState:
    """The segments of a snapshot, in bytes.

    Attributes:
        segments: Number of segments.
        reserved: All of them.
        allocated: Blocks in use.
        requested: Asked for by those and by pending ones.
        pending: Freed, and awaiting another stream.
        idle: Segments that are wholly free.
        holes: Free beside blocks in use.
    """

    segments: int
    reserved: int
    allocated: int
    requested: int
    pending: int
    idle: int
    holes: int


def is_end_state_only(trace: Trace) -> bool:
    """Tells whether a recording says what was reserved at its end, and not how that came about.

    A memory snapshot taken without a history lists what is in use; in it no memory is ever freed, and no segment taken.
    """
    if not len(trace.table(Segments)):
        return False
    freed = trace.columns(Storages, "freed_op_id")["freed_op_id"]
    actions = trace.columns(AllocatorEvents, "action")["action"]
    return bool(np.all(freed == NONE)) and not {"segment_alloc", "segment_map"} & set(actions.distinct.tolist())


def describe_end(segments: Segments) -> EndState:
    """Sums up segments."""
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
