"""When each operator of a recording began and ended, in whole nanoseconds that never overlap."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from memprof.trace.schema import DeviceMemory, Floats, HostMemory, Ints, Ops, Steps
from memprof.trace.store import Trace

#: How long an operator is drawn whose duration is not known.
_UNKNOWN_NS = 1000


@dataclass(frozen=True, eq=False)
class Times:
    """Times of one rank, in nanoseconds after the beginning of the timeline.

    Attributes:
        base_us: That beginning, Unix time.
        start_ns: When each operator began; each later than the one before. Shape ``(ops,)``.
        end_ns: When it ended: no later than the next one began. Its duration is that without the recorder.
    """

    base_us: float
    start_ns: Ints
    end_ns: Ints

    def of_us(self, moments_us: Floats) -> Ints:
        """Returns moments of Unix time; what is not known, or before the beginning, is the beginning."""
        since = np.where(np.isfinite(moments_us), moments_us - self.base_us, 0.0)
        moments: Ints = np.maximum(np.rint(since * 1000), 0).astype(np.int64)
        return moments


def earliest_us(trace: Trace) -> float:
    """Returns the first moment that a rank tells of, Unix time; infinite where it has no operators and no steps."""
    moments = [trace.columns(kind, "start_us")["start_us"] for kind in (Ops, Steps)]
    if not any(len(one) for one in moments):
        return math.inf
    moments += [trace.columns(kind, "time_us")["time_us"] for kind in (HostMemory, DeviceMemory)]
    known = [one[np.isfinite(one)] for one in moments]
    # Where none is known, the order of its operators is.
    return min((float(one.min()) for one in known if len(one)), default=0.0)


def time_operators(trace: Trace, base_us: float) -> Times:
    """Puts a rank's operators in time.

    Order is ``op_id``, and clocks tie or are read in several threads: an operator that its clock puts before an earlier
    one begins a nanosecond after that.

    Args:
        trace: The rank.
        base_us: The beginning of the timeline, Unix time by the rank's clock.
    """
    columns = trace.columns(Ops, "start_us", "duration_us")
    start_us, duration_us = columns["start_us"], columns["duration_us"]
    place = np.arange(len(start_us))
    times = Times(base_us, place, place)
    start = np.maximum.accumulate(times.of_us(start_us) - place) + place if len(place) else place
    known = np.isfinite(duration_us)
    lasts = np.where(known, np.rint(np.where(known, duration_us, 0.0) * 1000), _UNKNOWN_NS).astype(np.int64)
    end = start + np.maximum(lasts, 1)
    end[:-1] = np.minimum(end[:-1], start[1:])
    return Times(base_us, start, end)
