"""Leaks in a series of recordings or snapshots of one job: what is in use at the end of each, by line of code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memprof.analysis.report.sources import find_sources
from memprof.errors import UsageError
from memprof.trace.schema import NONE, Ops, Stacks, Storages
from memprof.trace.store import Trace


@dataclass(frozen=True)
class GrowingLine:
    """Memory of one line of code that grows from each recording to the next.

    Attributes:
        line: The line, or the operator where no line is known; "" for memory from before the recordings.
        bytes: Its bytes in use at the end of each.
    """

    line: str
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class Series:
    """Memory in use at the end of consecutive recordings.

    Attributes:
        names: Their files.
        bytes: All bytes in use at the end of each.
        lines: The lines whose bytes always grow, those that grow most first.
    """

    names: tuple[str, ...]
    bytes: tuple[int, ...]
    lines: tuple[GrowingLine, ...]

    @property
    def is_growing(self) -> bool:
        """Whether the memory in use grows from each to the next."""
        return _always_grows(self.bytes)


def compare_series(traces: Sequence[Trace]) -> Series:
    """Compares what is in use at the end of recordings of one job.

    Args:
        traces: The recordings, each of one rank, in their order.

    Raises:
        UsageError: There are fewer than three: two cannot tell growth from a difference.
    """
    if len(traces) < 3:
        raise UsageError("growth shows in three recordings or more: give each one's file, in the order of the job.")
    ends = [_by_line(trace) for trace in traces]
    lines = sorted({line for end in ends for line in end})
    grown = [GrowingLine(line, tuple(end.get(line, 0) for end in ends)) for line in lines]
    grown = [one for one in grown if _always_grows(one.bytes)]
    return Series(
        names=tuple(str(trace.path.name) for trace in traces),
        bytes=tuple(sum(end.values()) for end in ends),
        lines=tuple(sorted(grown, key=lambda one: one.bytes[0] - one.bytes[-1])),
    )


def _by_line(trace: Trace) -> dict[str, int]:
    """Returns the bytes in use at the end by the line that allocated them."""
    storages, ops = trace.table(Storages), trace.table(Ops)
    sources = find_sources(trace.table(Stacks))
    found: dict[str, int] = {}
    for row in np.flatnonzero(storages.freed_op_id == NONE).tolist():
        op = int(storages.created_op_id[row])
        line = None if op == NONE else sources.of_stack(int(ops.stack_id[op]))
        name = line.place if line is not None else "" if op == NONE else str(ops.name[op])
        found[name] = found.get(name, 0) + int(storages.allocated_bytes[row])
    return found


def _always_grows(sizes: Sequence[int]) -> bool:
    return all(later > earlier for earlier, later in pairwise(sizes))
