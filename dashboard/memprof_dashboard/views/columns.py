"""Peaks of every rank of a recording: read one rank at a time, downsampled, and cut into comparable columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.replay.history import History
from memprof.trace.schema import NONE, Floats, Ints
from memprof.trace.store import Trace
from memprof_dashboard.figures.shared import draw

#: Maximum stretches stored per rank; a rank with at most as many operators is stored exactly.
MOST_STRETCHES = 16_384
#: Maximum columns in which ranks are compared.
MOST_COLUMNS = 300


@dataclass(frozen=True, eq=False)
class RankPeaks:
    """The fullest operator of each of many short stretches of one rank; arrays of shape ``(stretches,)``.

    Attributes:
        rank: Its number.
        ops: Number of its operators.
        left: Where each stretch begins.
        op_ids: The peak operator of each.
        peaks: Bytes alive during it.
        largest: The category that most of them are of, as a place in ``categories``.
        largest_bytes: Bytes of that category.
        phase: Phase of the operator, as a place in ``phases``.
        step: Its step.
        categories: Names of the categories.
        phases: Names of the phases.
        step_left: Where each step begins, and where the last ends; shape ``(steps + 1,)``.
        step_number: Number of each step.
    """

    rank: int
    ops: int
    left: np.ndarray
    op_ids: np.ndarray
    peaks: Ints
    largest: np.ndarray
    largest_bytes: Ints
    phase: np.ndarray
    step: np.ndarray
    categories: tuple[str, ...]
    phases: tuple[str, ...]
    step_left: Ints
    step_number: Ints


def read_peaks(trace: Trace) -> RankPeaks:
    """Reads one rank; only the returned columns are kept.

    Raises:
        BadInputError: The rank's recording is damaged.
    """
    history = History(trace)
    if not history.ops:
        none = np.empty(0, dtype=np.int64)
        return RankPeaks(trace.rank, 0, none, none, none, none, none, none, none, (), (), none, none)
    drawn = draw(history.total, 0, history.ops, MOST_STRETCHES)
    split = np.array([history.alive_bytes(name, drawn.op_ids) for name in history.categories], dtype=np.int64)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(history.step)) + 1)).astype(np.int64)
    return RankPeaks(
        rank=trace.rank,
        ops=history.ops,
        left=drawn.left.astype(np.int32),
        op_ids=drawn.op_ids.astype(np.int32),
        peaks=history.total[drawn.op_ids],
        largest=split.argmax(axis=0).astype(np.int8),
        largest_bytes=split.max(axis=0),
        phase=history.phase[drawn.op_ids],
        step=history.step[drawn.op_ids],
        categories=history.categories,
        phases=history.phases,
        step_left=np.append(starts, history.ops),
        step_number=history.step[starts].astype(np.int64),
    )


@dataclass(frozen=True, eq=False)
class Compared:
    """Ranks side by side, each cut into the same columns.

    Attributes:
        edges: Where columns begin and the last ends, as operators of the selected rank; shape ``(columns + 1,)``.
        ranks: The ranks.
        stretch: The fullest stretch of each rank and column, ``NONE`` where it has no operators there; shape
            ``(ranks, columns)``.
        peaks: Bytes alive there, NaN where there is none, of the same shape.
    """

    edges: Ints
    ranks: tuple[RankPeaks, ...]
    stretch: Ints
    peaks: Floats

    @property
    def spread(self) -> Floats:
        """Highest minus lowest peak of the ranks in each column, in bytes; NaN where fewer than two have it."""
        is_there = np.isfinite(self.peaks)
        spread = np.where(is_there, self.peaks, -np.inf).max(axis=0) - np.where(is_there, self.peaks, np.inf).min(
            axis=0
        )
        return np.where(is_there.sum(axis=0) > 1, spread, np.nan)

    def peak_stretch(self, place: int) -> int:
        """Returns the fullest stretch of a rank in what is compared, ``NONE`` where it has no operators there."""
        peaks = self.peaks[place]
        return int(self.stretch[place, np.nanargmax(peaks)]) if np.isfinite(peaks).any() else NONE


def compare_ranks(ranks: tuple[RankPeaks, ...], reference: RankPeaks, first: int, end: int) -> Compared:
    """Cuts the same range out of every rank, by relative position in the same steps: ranks may run different operators.

    Args:
        ranks: The ranks.
        reference: The rank whose operators ``first`` and ``end`` are.
        first: First operator of the range.
        end: End of the range (exclusive).
    """
    count = min(MOST_COLUMNS, end - first)
    edges = first + (np.arange(count + 1) * (end - first)) // count
    stretch = np.array([_columns(rank, _positions(rank, reference, edges)) for rank in ranks], dtype=np.int64)
    peaks = np.array(
        [
            np.where(row == NONE, np.nan, np.append(rank.peaks, 0)[row].astype(np.float64))
            for rank, row in zip(ranks, stretch, strict=True)
        ]
    )
    return Compared(edges, ranks, stretch, peaks)


def _positions(rank: RankPeaks, reference: RankPeaks, edges: Ints) -> Floats:
    """Returns the operators of a rank that lie as far inside the same steps; NaN where it has no such step."""
    if rank is reference:
        return edges.astype(np.float64)
    starts, numbers = reference.step_left, reference.step_number
    rows = np.clip(np.searchsorted(starts, edges, side="right") - 1, 0, len(numbers) - 1)
    inside = (edges - starts[rows]) / (starts[rows + 1] - starts[rows])
    row_of = {int(number): row for row, number in enumerate(rank.step_number.tolist())}
    there = np.array([row_of.get(number, NONE) for number in numbers[rows].tolist()], dtype=np.int64)
    # An edge between two steps belongs to both: the end of one where the rank lacks the next.
    before = np.array([row_of.get(number, NONE) for number in numbers[np.maximum(rows - 1, 0)].tolist()])
    ends_step = (inside == 0) & (there == NONE) & (before != NONE)
    there, inside = np.where(ends_step, before, there), np.where(ends_step, 1.0, inside)
    if not rank.ops:
        return np.full(len(edges), np.nan)
    width = rank.step_left[there + 1] - rank.step_left[there]
    return np.where(there == NONE, np.nan, np.round(rank.step_left[there] + inside * width))


def _columns(rank: RankPeaks, positions: Floats) -> list[int]:
    """Returns the fullest stretch of each column; ``NONE`` where the rank has no operators in it."""
    columns: list[int] = []
    for left, right in zip(positions[:-1].tolist(), positions[1:].tolist(), strict=True):
        if not (np.isfinite(left) and np.isfinite(right)) or left >= rank.ops:
            columns.append(NONE)
            continue
        start = int(np.searchsorted(rank.left, left, side="right")) - 1
        stop = max(int(np.searchsorted(rank.left, right, side="left")), start + 1)
        columns.append(start + int(rank.peaks[start:stop].argmax()))
    return columns
