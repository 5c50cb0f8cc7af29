"""Merges operators and allocation events into one order: which event belongs to which operator.

Memory allocated between two operators (by autograd itself, by code that bypasses the dispatcher, inside compiled
regions) gets an operator row of its own, so that a replay over operators processes every byte in its true order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.schema import NONE, Bools, Ints

#: Death index of a block that outlives the recording.
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Timeline:
    """Operators and events in one order. Rows of operators are final `op_id`s.

    Attributes:
        raw_op: Raw operator of each row; NONE for memory allocated between operators. Shape (ops,).
        start_ns: When each row starts. Shape (ops,).
        event_time_ns: Times of the events, ascending. Shape (events,).
        event_address: Their addresses.
        event_bytes: Their sizes, negative for frees.
        event_op: Row each event belongs to: the running one, or the last one before; NONE before the first.
        event_is_inside: Whether that row was running, or about to run.
    """

    raw_op: Ints
    start_ns: Ints
    event_time_ns: Ints
    event_address: Ints
    event_bytes: Ints
    event_op: Ints
    event_is_inside: Bools

    def position(self, moments_ns: Ints) -> Ints:
        """Returns how many events have happened by each time."""
        return np.searchsorted(self.event_time_ns, moments_ns, side="right")

    def row_of_raw(self, raw_count: int) -> Ints:
        """Returns the row of each raw operator."""
        rows = np.full(raw_count, NONE, dtype=np.int64)
        is_raw = self.raw_op != NONE
        rows[self.raw_op[is_raw]] = np.flatnonzero(is_raw)
        return rows


def merge(op_start_ns: Ints, op_end_ns: Ints, time_ns: Ints, address: Ints, size_bytes: Ints) -> Timeline:
    """Merges operators and allocation events by time.

    Args:
        op_start_ns: Start of each raw operator, ascending. Shape (raw ops,).
        op_end_ns: Their ends.
        time_ns: Time of each event, in the allocator's order. Shape (events,).
        address: Their addresses.
        size_bytes: Their sizes, negative for frees.
    """
    order = np.argsort(time_ns, kind="stable")
    time_ns, address, size_bytes = time_ns[order], address[order], size_bytes[order]
    count = len(op_start_ns)
    gap = np.searchsorted(op_start_ns, time_ns, side="right") - 1
    is_inside = np.zeros(len(time_ns), dtype=np.bool_)
    after_first = gap >= 0
    is_inside[after_first] = time_ns[after_first] <= op_end_ns[gap[after_first]]

    # Allocated just before an operator and alive when it starts: the operator's own (a number wrapped as a tensor).
    following = gap + 1
    freed = np.flatnonzero(~is_inside & (size_bytes < 0))
    last_free = np.full(count + 1, NONE, dtype=np.int64)
    np.maximum.at(last_free, following[freed], freed)
    belongs = ~is_inside & (size_bytes > 0) & (following < count) & (np.arange(len(gap)) > last_free[following])
    gap = gap + belongs
    is_inside |= belongs
    after_first = gap >= 0

    # A separate row begins with the first allocation after an operator, and with each allocation that follows a free.
    is_between_taking = ~is_inside & (size_bytes > 0)
    previous_same = np.zeros(len(time_ns), dtype=np.bool_)
    previous_same[1:] = (gap[1:] == gap[:-1]) & is_between_taking[:-1]
    begins = is_between_taking & ~previous_same
    begun = np.cumsum(begins)
    extra_gap = gap[begins]

    row_of_raw = np.arange(count) + np.searchsorted(extra_gap, np.arange(count), side="left")
    row_of_extra = extra_gap + 1 + np.arange(len(extra_gap))
    raw_op = np.full(count + len(extra_gap), NONE, dtype=np.int64)
    raw_op[row_of_raw] = np.arange(count)
    start_ns = np.empty(len(raw_op), dtype=np.int64)
    start_ns[row_of_raw] = op_start_ns
    start_ns[row_of_extra] = time_ns[begins]

    event_op = np.full(len(time_ns), NONE, dtype=np.int64)
    event_op[after_first] = row_of_raw[gap[after_first]]
    if len(extra_gap):
        latest = np.maximum(begun - 1, 0)
        in_extra = ~is_inside & (begun > 0) & (extra_gap[latest] == gap)
        event_op[in_extra] = row_of_extra[latest[in_extra]]
    return Timeline(raw_op, start_ns, time_ns, address, size_bytes, event_op, is_inside)


def first_rows(values: Ints, wanted: Ints) -> Ints:
    """Returns the first row with each wanted value; NONE where there is none. Shape (wanted,).

    Args:
        values: Values of the rows, in any order. Shape (rows,).
        wanted: Values to look up. Shape (wanted,).
    """
    if not len(values):
        return np.full(len(wanted), NONE, dtype=np.int64)
    order = np.argsort(values, kind="stable")
    known = values[order]
    place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[place] == wanted, order[place], NONE)
