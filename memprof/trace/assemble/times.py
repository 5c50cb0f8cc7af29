"""Matches each operator with the timed step; estimates the duration of those that were never run.

The match shows how long an operator takes without the recorder, and where the dispatch mode changed what ran: with a
mode on the stack, autograd accumulates gradients out of place instead of in place.

Source: S. Williams, A. Waterman, D. Patterson, 2009, Roofline: an insightful visual performance model. Applied here to
each operator separately; bytes are those of its tensors, and all arithmetic runs at the matrix product rate of fp32
or bf16, by the type of the result.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from memprof.trace.assemble.memory.native_events import CPU
from memprof.trace.assemble.recording import Recording
from memprof.trace.files.spool import FLAG_VIEW
from memprof.trace.manifest import Speed
from memprof.trace.operator_facts import MOVES_NOTHING, are_among
from memprof.trace.schema import NONE, Bools, Floats, Ints, Ops, Steps, Storages, Uses
from memprof.trace.step import largest_written

#: Maximum share of working operators without a partner in the timed step; above it, the steps are taken to differ.
_TOLERATED_MISSING = 0.2
#: How many operators to look ahead for where two sequences match again, and how many must then match.
_LOOK_AHEAD = 96
_AGREEING = 3
#: The same where one sequence has a long extra passage.
_LONG_LOOK_AHEAD = 20_000
_LONG_RUN = 8
_HALF = ("bfloat16", "float16")


def packet(name: str) -> str:
    """Returns an operator's name in the form torch's profiler uses: aten.addmm.default is aten::addmm."""
    namespace, _, rest = name.partition(".")
    return f"{namespace}::{rest.rpartition('.')[0] or rest}"


@dataclass(frozen=True)
class Partners:
    """The timed step's side of each operator of a recorded step. Shape (ops,) each.

    Attributes:
        timed_row: Its row there; NONE without a partner.
        duration_us: Its duration there, children included; NaN without a partner.
        runs_in_place: Without the recorder, the operator's in-place form runs.
    """

    timed_row: Ints
    duration_us: Floats
    runs_in_place: Bools

    def spread(self, is_seen: Bools) -> Partners:
        """Returns the partners of all operators, of which only some were looked for.

        Args:
            is_seen: The operators that these are the partners of. Shape (ops,).
        """
        timed_row = np.full(len(is_seen), NONE, dtype=np.int64)
        duration_us, runs_in_place = np.full(len(is_seen), np.nan), np.zeros(len(is_seen), dtype=np.bool_)
        timed_row[is_seen], duration_us[is_seen] = self.timed_row, self.duration_us
        runs_in_place[is_seen] = self.runs_in_place
        return Partners(timed_row, duration_us, runs_in_place)


def find_partners(
    names: list[str], is_work: Bools, timed_names: list[str], duration_ns: Ints, depth: Ints
) -> Partners | None:
    """Matches each operator of a recorded step with the timed step.

    The timed step also has composite operators above those that the recorder saw, and operators called by kernels below
    them. Read in order, parents first: a matched operator consumes its whole subtree.

    Args:
        names: Operators of a recorded step, as packets. Length ops.
        is_work: Those that do work of their own; an extra or missing view makes no difference. Shape (ops,).
        timed_names: Operators of the timed step, parents before children.
        duration_ns: Their durations, children included.
        depth: Their depths.

    Returns:
        The partners; None when the two steps differ too much.
    """
    if not timed_names or not names:
        return None
    matched = _match(tuple(names), is_work.tobytes(), tuple(timed_names), depth.astype(np.int64).tobytes())
    if matched is None:
        return None
    timed_row: Ints = np.frombuffer(matched[0], np.int64).copy()
    runs_in_place: Bools = np.frombuffer(matched[1], np.bool_).copy()
    duration_us = np.where(timed_row == NONE, np.nan, np.asarray(duration_ns)[timed_row] / 1000)
    return Partners(timed_row, duration_us, runs_in_place)


@lru_cache(maxsize=16)
def _match(
    names: tuple[str, ...], is_work: bytes, timed_names: tuple[str, ...], depth: bytes
) -> tuple[bytes, bytes] | None:
    """Returns the row in the timed step of each operator, and whether its in-place form runs; None where they differ.

    Steps of a job, and ranks of one, mostly run the same operators, and are matched once.
    """
    levels = np.frombuffer(depth, np.int64)
    works = np.frombuffer(is_work, np.bool_)
    mine = [_functional(name) for name in names]
    theirs = [_functional(name) for name in timed_names]
    wanted = set(mine)
    kept = _outermost([i for i, name in enumerate(theirs) if name in wanted], levels)
    partner = _align(mine, [theirs[i] for i in kept])
    if ((partner == NONE) & works).sum() > _TOLERATED_MISSING * max(works.sum(), 1):
        return None
    inner = _inner(kept, list(timed_names), levels)
    timed_row = np.full(len(names), NONE, dtype=np.int64)
    runs_in_place = np.zeros(len(names), dtype=np.bool_)
    for i in np.flatnonzero(partner != NONE):
        timed = timed_row[i] = inner[partner[i]]
        runs_in_place[i] = timed_names[timed] == names[i] + "_"
    return timed_row.tobytes(), runs_in_place.tobytes()


def _functional(name: str) -> str:
    """Returns an operator's name without its in-place suffix."""
    return name.removesuffix("_")


def _outermost(candidates: list[int], depth: Ints) -> list[int]:
    kept: list[int] = []
    chosen = set(candidates)
    inside = NONE
    for position, level in enumerate(depth.tolist()):
        if inside != NONE and level > inside:
            continue
        inside = level if position in chosen else NONE
        if inside != NONE:
            kept.append(position)
    return kept


def _inner(kept: list[int], names: list[str], depth: Ints) -> list[int]:
    """Returns the row that does each operator's work.

    Below the job's own dispatch mode every operator appears twice: around the mode's Python code, and inside it.
    Composite operators that call another overload of their name look the same, but are few.
    """
    levels = depth.tolist()
    found = []
    for row in kept:
        inner = row
        while (child := _child_of_its_name(inner, names, levels)) != NONE:
            inner = child
        found.append(inner)
    changed = sum(inner != row for inner, row in zip(found, kept, strict=True))
    return found if 2 * changed > len(kept) else kept


def _child_of_its_name(row: int, names: list[str], levels: list[int]) -> int:
    """Returns the last descendant of an operator that has the same name; NONE where none has."""
    found, position = NONE, row + 1
    while position < len(levels) and levels[position] > levels[row]:
        if levels[position] == levels[row] + 1 and names[position] == names[row]:
            found = position
        position += 1
    return found


def _align(mine: list[str], theirs: list[str]) -> Ints:
    """Aligns two sequences in order; after a mismatch they realign at the nearest matching run."""
    partner = np.full(len(mine), NONE, dtype=np.int64)
    places, long_places = _places(theirs, _AGREEING), _places(theirs, _LONG_RUN)
    i = j = 0
    while i < len(mine) and j < len(theirs):
        if mine[i] == theirs[j]:
            partner[i] = j
            i, j = i + 1, j + 1
            continue
        ahead = _next_meeting(mine[i : i + _LOOK_AHEAD + _AGREEING], places, j)
        if ahead is None:
            # One of the two did something extra for a while: an evaluation, a checkpoint write.
            b = _first_from(long_places.get(tuple(mine[i : i + _LONG_RUN]), []), j)
            ahead = (0, b - j) if b is not None and b - j < _LONG_LOOK_AHEAD else (1, 1)
        i, j = i + ahead[0], j + ahead[1]
    return partner


def _next_meeting(mine: list[str], places: dict[tuple[str, ...], list[int]], j: int) -> tuple[int, int] | None:
    """Returns how far to skip in each sequence to the nearest matching run; on a tie, the fewest of mine."""
    best: tuple[int, int] | None = None
    nearest = _LOOK_AHEAD
    for ahead in range(min(len(mine), _LOOK_AHEAD)):
        if ahead >= nearest:
            break
        b = _first_from(places.get(tuple(mine[ahead : ahead + _AGREEING]), []), j)
        if b is not None and ahead + b - j < nearest:
            best, nearest = (ahead, b - j), ahead + b - j
    return best


def _places(names: list[str], length: int) -> dict[tuple[str, ...], list[int]]:
    """Returns where each run of a given number of names begins, in order; runs at the end are shorter."""
    places: dict[tuple[str, ...], list[int]] = {}
    for place in range(len(names)):
        places.setdefault(tuple(names[place : place + length]), []).append(place)
    return places


def _first_from(places: list[int], start: int) -> int | None:
    """Returns the first of the ascending positions at or after a start."""
    found = bisect_left(places, start)
    return places[found] if found < len(places) else None


def corrected_durations(duration_ns: Ints, is_view: Bools) -> Floats:
    """Subtracts the dispatch mode's own overhead from durations measured under it.

    A view does no work of its own, so the median duration of views is the mode's overhead per call. Without views the
    overhead is unknown, and durations stay as measured.

    Args:
        duration_ns: Durations as measured. Shape (ops,).
        is_view: Operators that only make views. Shape (ops,).
    """
    cost = float(np.median(duration_ns[is_view])) if is_view.any() else 0.0
    corrected: Floats = np.maximum(duration_ns - cost, 0.0) / 1000
    return corrected


def roofline(recording: Recording, ops: Ops, storages: Storages, uses: Uses, speed: Speed) -> tuple[Floats, str]:
    """Returns a lower bound on each row's duration (microseconds, NaN between operators), and its source.

    Args:
        recording: The raw recording of a dry run.
        ops: Its operators, with their FLOPs and bytes.
        storages: What they use.
        uses: How they use it.
        speed: Speed of the machine; durations are 0 where it is unknown.
    """
    if not speed.memory_bytes_per_us or not speed.fp32_flops_per_us:
        return np.where(recording.is_real, 0.0, np.nan), "none: nothing was computed, and the machine was not measured"
    is_view = recording.spread((recording.raw["flags"] & FLAG_VIEW) != 0, fill=False)
    moves = ~is_view & ~are_among(ops.name, MOVES_NOTHING)
    moved = np.where(moves, ops.read_bytes + ops.written_bytes, 0)
    rate = np.where(_is_half(ops, storages, uses), speed.bf16_flops_per_us, speed.fp32_flops_per_us)
    least_us = np.maximum(moved / speed.memory_bytes_per_us, ops.flops / np.maximum(rate, speed.fp32_flops_per_us))
    speeds = "this machine's measured speeds" if recording.memory_events.device == CPU else "the data sheet's speeds"
    source = f"roofline: a lower bound from operations, bytes and {speeds}; nothing was computed"
    return np.where(recording.is_real, least_us, np.nan), source


def _is_half(ops: Ops, storages: Storages, uses: Uses) -> Bools:
    """Returns which operators have a 16-bit tensor as their largest result, or write to one. Shape (ops,)."""
    is_half = np.append(np.isin(storages.dtype.astype(str), _HALF), False)  # the last stands for NONE
    found: Bools = is_half[largest_written(ops, storages, uses)]
    return found


def with_roofline(steps: Steps, ops: Ops) -> Steps:
    """Returns the steps of a dry run, each as long as the sum of its operators."""
    own_us = np.where(np.isnan(ops.duration_us), 0.0, ops.duration_us)
    per_step = np.array([own_us[ops.step == step].sum() for step in steps.step.tolist()], dtype=np.float64)
    return steps.replace(duration_us=per_step)
