"""Device time of operators, and the stream each runs on."""

from __future__ import annotations

import numpy as np

from memprof.trace.assemble.memory.native_events import CPU
from memprof.trace.assemble.recording import Recording
from memprof.trace.files.spool import WRITE
from memprof.trace.schema import NONE, Bools, Floats, Ints


def has_kernels(recording: Recording) -> bool:
    """Whether device time was measured."""
    return len(recording.spool.rows["kernels"]) > 0


def on_device(recording: Recording, processor_us: Floats, timed_row: Ints) -> Floats:
    """Returns the device time of each raw operator, in microseconds. Shape (raw,).

    Launch overhead on the CPU overlaps with device work and is excluded. Operators on CPU tensors get their
    CPU time.

    Args:
        recording: The raw recording.
        processor_us: CPU time of each operator. Shape (raw,).
        timed_row: The operator's row in the timed step; NONE without one.

    Returns:
        NaN where no device was timed or the operator is missing from the timed step.
    """
    work_us = np.full(recording.raw_count, np.nan)
    if has_kernels(recording):
        kernels, timed = recording.spool.columns("kernels"), recording.spool.columns("times")
        own = np.zeros(len(timed["depth"]), dtype=np.int64)
        np.add.at(own, kernels["row"], kernels["device_ns"])
        is_timed = timed_row != NONE
        work_us[is_timed] = subtree_sums(own, timed["depth"])[timed_row[is_timed]] / 1000
    return np.where(is_on_processor(recording), processor_us, work_us)


def subtree_sums(own: Ints, depth: Ints) -> Ints:
    """Sums a column over each row and its descendants.

    Args:
        own: Values of the rows, parents before children. Shape (rows,).
        depth: Their depths.
    """
    total = np.concatenate(([0], np.cumsum(own)))
    end = np.full(len(depth), len(depth), dtype=np.int64)
    open_rows: list[int] = []
    for row, level in enumerate(depth.tolist()):
        while open_rows and depth[open_rows[-1]] >= level:
            end[open_rows.pop()] = row
        open_rows.append(row)
    sums: Ints = total[end] - total[:-1]
    return sums


def is_on_processor(recording: Recording) -> Bools:
    """Returns which raw operators return only CPU tensors. Shape (raw,)."""
    touches = recording.spool.columns("touches")
    op = touches["op"] - recording.epoch.first_op
    is_made = (op >= 0) & (op < recording.raw_count) & (touches["role"] == WRITE) & (touches["tensor"] != NONE)
    is_here = np.array([device == CPU for device in recording.tensors.device] or [True], dtype=np.bool_)
    makes, makes_elsewhere = (np.zeros(recording.raw_count, dtype=np.bool_) for _ in range(2))
    makes[op[is_made]] = True
    makes_elsewhere[op[is_made][~is_here[touches["tensor"][is_made]]]] = True
    return makes & ~makes_elsewhere


def streams_of(recording: Recording) -> Ints:
    """Returns the stream of each raw operator, numbered by first appearance; 0 is the default stream. Shape (raw,)."""
    changes = recording.spool.columns("streams")
    stream = np.zeros(recording.raw_count, dtype=np.int64)
    if not len(changes["op"]):
        return stream
    numbers = {0: 0}
    for raw in changes["stream"].tolist():
        numbers.setdefault(raw, len(numbers))
    place = np.searchsorted(changes["op"], np.arange(recording.raw_count) + recording.epoch.first_op, side="right") - 1
    known = place >= 0
    of_change = np.array([numbers[raw] for raw in changes["stream"].tolist()], dtype=np.int64)
    stream[known] = of_change[place[known]]
    return stream
