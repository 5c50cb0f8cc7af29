"""Whether live memory grows: from step to step, and over a series of recordings or snapshots of one job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from memprof.analysis.report.sources import find_sources
from memprof.errors import UsageError
from memprof.trace.cut import cuttable_steps
from memprof.trace.files.coded import coded_column
from memprof.trace.schema import NONE, NOT_RECORDED, Ints, Ops, Stacks, StepPeaks, Steps, Storages
from memprof.trace.store import Trace
from memprof.units import format_bytes

#: Growth shows in this many steps in a row, and in this many rises where not every step rises.
LEAST_STEPS = 3
#: A rise is steady if the largest is at most this multiple of the smallest.
_STEADY = 1.25
#: A run is divided into this many parts, of which none may reach a lower floor than the one before.
_PARTS = 6
#: Growth that has slowed down to this share of what it was is that of a cache that fills up.
_LEAST_SHARE = 0.25
#: Inputs have grown if those of the last part are at least this multiple of those of the first.
_LARGER = 1.1
#: Larger inputs explain a rise of memory up to this multiple of their own share.
_IN_PROPORTION = 1.25
#: Growth per step below this comes from lists of numbers, not of tensors.
LEAST_LEAK_BYTES = 1024
#: Fewer rises than tell growth from a cache are noticed where they are above this share of the peak.
_NOTICED = 0.005


#: Places of steps, from 0.
Places = np.ndarray[tuple[Any, ...], np.dtype[np.int32]]


@dataclass(frozen=True)
class Growth:
    """How live memory changes over steps.

    Attributes:
        bytes_per_step: Growth per step; 0 where memory does not grow, None where undecided.
        first_step: First step of the observation.
        last_step: Last one.
        how: ``storages``: from every allocation of consecutive steps; ``counts``: from the peaks of a whole run;
            ``""`` where unknown.
        why_unknown: A sentence; "" where known. Beside ``bytes_per_step``, it holds unless lines make it up.
        follows_inputs: The inputs of the models grew as well: only tensors that stay tell growth from larger steps.
    """

    bytes_per_step: int | None
    first_step: int = 0
    last_step: int = 0
    how: str = ""
    why_unknown: str = ""
    follows_inputs: bool = False

    @property
    def is_rise(self) -> bool:
        """Whether memory rose, be it too seldom to know whether it will go on."""
        return bool(self.bytes_per_step) or (self.bytes_per_step is None and bool(self.how))


def describe_growth(growth: Growth) -> str:
    """Returns the verdict in one sentence."""
    if growth.bytes_per_step is None:
        return f"Cannot determine whether memory grows: {growth.why_unknown}"
    steps = f"steps {growth.first_step} to {growth.last_step}"
    if not growth.bytes_per_step:
        return f"Memory does not grow from step to step ({steps})."
    return f"Memory grows by {format_bytes(growth.bytes_per_step)} a step ({steps})."


@dataclass(frozen=True, eq=False)
class StepEnds:
    """The ends of consecutive steps, and the storages that are alive at them.

    Attributes:
        steps: Their numbers, shape ``(steps,)``.
        first_op: First operator of each.
        last_op: Last operator of each.
        storages: All storages of the recording.
    """

    steps: Ints
    first_op: Ints
    last_op: Ints
    storages: Storages

    @cached_property
    def born(self) -> Places:
        """Place of the step that made each storage, from 0; -1 before the steps, and their number behind them."""
        created = self.storages.created_op_id
        places = np.searchsorted(self.first_op, created, side="right").astype(np.int32) - 1
        places[created > self.last_op[-1]] = len(self.steps)
        return places

    @cached_property
    def gone(self) -> Places:
        """Place of the first step at whose end each storage is no longer alive; their number if it still is."""
        freed = self.storages.freed_op_id
        places = np.searchsorted(self.last_op, freed, side="left").astype(np.int32)
        places[freed == NONE] = len(self.steps)
        return places

    def alive_bytes(self, *, is_older: bool = False) -> Ints:
        """Returns the bytes alive at the end of each step, of all storages or those older than it, shape ``(steps,)``.

        Args:
            is_older: Count only what was made before the step.
        """
        sizes, first = self.storages.allocated_bytes, np.maximum(self.born + int(is_older), 0)
        is_alive = first < self.gone
        changes = np.zeros(len(self.steps) + 1, dtype=np.int64)
        np.add.at(changes, first[is_alive], sizes[is_alive])
        np.subtract.at(changes, self.gone[is_alive], sizes[is_alive])
        return np.cumsum(changes)[:-1]


def find_step_ends(trace: Trace) -> StepEnds | None:
    """Returns the last run of consecutive complete recorded steps; None if there is none."""
    steps, ops, storages = trace.table(Steps), trace.table(Ops), trace.table(Storages)
    rows = np.flatnonzero(cuttable_steps(steps) & steps.is_complete)
    if not len(rows):
        return None
    numbers = steps.step[rows]
    gaps = ops.op_id[coded_column(ops, "name").is_any(NOT_RECORDED)]
    if len(gaps):  # storages that span a gap are two: only what was recorded before it counts
        rows = rows[steps.last_op_id[rows] < gaps[0]]
        storages = storages.replace(freed_op_id=np.where(storages.freed_op_id >= gaps[0], NONE, storages.freed_op_id))
        storages = storages.take(storages.created_op_id < gaps[0])
        numbers = steps.step[rows]
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    rows = rows[breaks[-1] + 1 :] if len(breaks) else rows
    return StepEnds(steps.step[rows], steps.first_op_id[rows], steps.last_op_id[rows], storages) if len(rows) else None


def first_third(count: int) -> int:
    """Returns how many of so many steps are the first third, against whose end the end of the last is compared."""
    return max(1, count // 3)


def rhythm(births: Sequence[int], count: int) -> int | None:
    """Returns in every how many steps memory is added that stays; 0 where it does not grow, None where undecided.

    Growth is a rise from the end of the first third of the steps to the end of the last, and it goes on: in every step,
    in steps at equal distances (three of them at least), or in four or more at others, not ever fewer. What was added
    once, or has stopped being added, is a cache that has filled up, if it has been full for long enough to know.

    Args:
        births: Places of the steps, from 0, in order, that made what is alive at the end of the last.
        count: Number of steps; what the last makes may yet go, and counts for nothing.
    """
    third = first_third(count)
    if not births or births[-1] < third - 1:
        return 0
    gaps = np.diff(births)
    longest, silence = int(gaps.max(initial=0)), count - 2 - births[-1]
    if len(births) == 1:
        return None
    if silence >= longest:  # the next one was due
        return 0 if silence >= max(2 * longest, third) else None
    if longest == gaps.min() and len(births) >= (2 if longest == 1 else LEAST_STEPS):
        return longest
    late = sum(2 * birth > births[0] + births[-1] for birth in births)
    return max(1, round(count / len(births))) if len(births) > LEAST_STEPS and 3 * late >= len(births) else None


def steady_rise(sizes: Ints) -> int:
    """Returns by how much sizes rise each time if that is always nearly the same, else 0."""
    rises = np.diff(sizes)
    is_steady = bool((rises > 0).all()) and int(rises.max()) <= int(rises.min()) * _STEADY
    return int(np.median(rises)) if is_steady else 0


def bytes_of_run(peaks: StepPeaks) -> Ints:
    """Returns what growth shows in: bytes at the end of each step, the peaks in recordings of earlier versions."""
    is_counted = peaks.end_bytes != NONE
    return np.where(is_counted, peaks.end_bytes, peaks.allocated_bytes * (not is_counted.any()))


def growth_of_run(peaks: StepPeaks) -> Growth | None:
    """Returns the growth of a whole run: of the floor of what steps leave, since batches differ; None without steps.

    Recordings of earlier versions have peaks alone.
    """
    if not len(peaks):
        return None
    values, counted = bytes_of_run(peaks), np.flatnonzero(peaks.end_bytes != NONE)
    alike = counted
    if not len(counted):
        names, counts = np.unique(peaks.how.astype(str), return_counts=True)
        alike = np.flatnonzero(peaks.how == names[np.argmax(counts)])  # sampled peaks are lower than complete ones
    count, alike = len(alike), alike[len(alike) // 4 :]  # optimizer state and caches are set up in the first steps
    if len(alike) < _PARTS:
        alike_only = f", {count} of them measured alike" if count < len(peaks) and not len(counted) else ""
        return Growth(
            None, why_unknown=f"the run has {len(peaks)} steps{alike_only}; growth shows from {_PARTS * 4 // 3} on."
        )
    steps, sizes, inputs = peaks.step[alike], values[alike], peaks.input_elements[alike]
    parts = np.array_split(np.arange(len(alike)), _PARTS)
    floors = np.array([part[np.argmin(sizes[part])] for part in parts])
    rises, spans = np.diff(sizes[floors]), np.maximum(np.diff(steps[floors]), 1)
    first, last, rose, third = int(steps[0]), int(steps[-1]), np.flatnonzero(rises > 0), first_third(_PARTS)
    whole = int(sizes[floors[-1]] - sizes[floors[0]])
    has_ended = not len(rose) or rose[-1] < (third - 1 if len(rose) == 1 else len(rises) - third)
    larger = inputs[floors]
    is_larger = bool((np.diff(larger)[rose] > 0).all() and larger[-1] > _LARGER * larger[0])
    # With all of it in proportion to the inputs, memory rises by the share that they do.
    share = float(larger[-1] - larger[0]) / max(int(larger[0]), 1)
    is_explained = is_larger and whole <= _IN_PROPORTION * share * float(sizes[floors[0]])
    if len(rose) in range(1, LEAST_STEPS) and not has_ended and (rises >= 0).all() and whole > _NOTICED * sizes[0]:
        why = (
            f"memory rose by {format_bytes(whole)} in steps {first} to {last}, too seldom to tell growth from a "
            "cache that fills up. Record a longer run."
        )
        return Growth(None, first, last, "counts", why, is_explained)
    rates = rises / spans
    if has_ended or len(rose) < LEAST_STEPS or (rises < 0).any() or rates[rose[-1]] < _LEAST_SHARE * rates.max():
        return Growth(0, first, last, "counts")
    floor = np.minimum.accumulate(sizes[: floors[-1] + 1][::-1])[::-1]
    begins, *_, ends = np.flatnonzero(np.diff(floor) > 0) + 1  # from a rise to another: whole rhythms
    rate = (floor[ends] - floor[begins]) / int(steps[ends] - steps[begins])
    why = ""
    if is_larger and not is_explained:
        why = (
            f"memory rose by {format_bytes(whole)} in steps {first} to {last}, and by a larger share than the models' "
            "inputs, which rose too. Record the job with inputs of one size."
        )
    return Growth(round(rate), first, last, "counts", why, is_larger)


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
