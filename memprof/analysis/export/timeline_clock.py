"""Start and end of each operator of a recording, in whole nanoseconds without overlap."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from memprof.trace.schema import DeviceMemory, Floats, HostMemory, Ints, Ops, Steps
from memprof.trace.store import Trace

#: Drawn duration of an operator whose duration is unknown.
_UNKNOWN_NS = 1000


@dataclass(frozen=True, eq=False)
class Times:
    """Times of one rank, in nanoseconds after the start of the timeline.

    Attributes:
        base_us: Start of the timeline, Unix time.
        start_ns: Start of each operator, strictly increasing. Shape ``(ops,)``.
        end_ns: End of each operator, at most the start of the next; durations are those without the recorder.
    """

    base_us: float
    start_ns: Ints
    end_ns: Ints

    def of_us(self, moments_us: Floats) -> Ints:
        """Converts moments of Unix time; unknown ones and those before the start of the timeline become its start."""
        since = np.where(np.isfinite(moments_us), moments_us - self.base_us, 0.0)
        moments: Ints = np.maximum(np.rint(since * 1000), 0).astype(np.int64)
        return moments


def earliest_us(trace: Trace) -> float:
    """Returns the first moment of a rank, Unix time; infinite where it has no operators and no steps."""
    moments = [trace.columns(kind, "start_us")["start_us"] for kind in (Ops, Steps)]
    if not any(len(one) for one in moments):
        return math.inf
    moments += [trace.columns(kind, "time_us")["time_us"] for kind in (HostMemory, DeviceMemory)]
    known = [one[np.isfinite(one)] for one in moments]
    # Where no time is known, the order of the operators is used.
    return min((float(one.min()) for one in known if len(one)), default=0.0)


def time_operators(trace: Trace, base_us: float) -> Times:
    """Assigns times to a rank's operators.

    The order is ``op_id``. Clocks tie or are read in several threads: an operator whose clock precedes an earlier
    operator's starts one nanosecond after it.

    Args:
        trace: The rank.
        base_us: Start of the timeline, Unix time by the rank's clock.
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
