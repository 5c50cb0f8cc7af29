"""The operators of a range that are drawn: one a column of the screen, its highest; the true peak is among them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memprof.replay.history import History
from memprof.trace.schema import Ints

#: Maximum columns drawn; more than a screen's width would be invisible.
COLUMNS = 800


@dataclass(frozen=True, eq=False)
class Drawn:
    """The operators drawn for a range.

    Attributes:
        first: First operator of the range.
        end: End of the range (exclusive).
        left: Where each column begins, shape ``(columns,)``.
        op_ids: The operator drawn in each column: its fullest one.
        lows: Fewest bytes alive in each column.
    """

    first: int
    end: int
    left: Ints
    op_ids: Ints
    lows: Ints

    @property
    def is_exact(self) -> bool:
        """Whether every operator has a column of its own."""
        return len(self.op_ids) == self.end - self.first

    def phase_runs(self, history: History) -> tuple[Ints, Ints]:
        """Returns the runs of columns of one phase.

        Returns:
            Their phases as places in ``history.phases``, ``len(history.phases)`` for recomputed operators, shape
            ``(runs,)``; and the first column of each, with the number of columns at the end, shape ``(runs + 1,)``.
        """
        codes = np.where(history.runs_again[self.op_ids], len(history.phases), history.phase[self.op_ids])
        starts = np.concatenate(([0], np.flatnonzero(np.diff(codes)) + 1)).astype(np.int64)[: len(codes)]
        return codes[starts].astype(np.int64), np.append(starts, len(codes))


def draw(total: Ints, first: int, end: int, columns: int = COLUMNS, cuts: Ints | None = None) -> Drawn:
    """Downsamples a range: returns every operator, or the peak operator of each column.

    All categories are evaluated at these operators, so the stack shows bytes live at the same time. Sampling each
    category separately would draw totals that never occurred.

    Args:
        total: Bytes alive during each operator of the recording, shape ``(ops,)``.
        first: First operator of the range.
        end: End of the range (exclusive).
        columns: Most columns.
        cuts: Operators at which a column has to begin, in addition; None for none.
    """
    count = end - first
    if count <= columns:
        op_ids = np.arange(first, end)
        return Drawn(first, end, op_ids, op_ids, total[first:end])
    left = first + (np.arange(columns) * count) // columns
    if cuts is not None:
        left = np.union1d(left, cuts[(cuts > first) & (cuts < end)])
    lows = np.minimum.reduceat(total[first:end], left - first)
    # The first operator that reaches each column's maximum. Loops over columns, not operators.
    edges = [*left.tolist(), end]
    op_ids = np.array([low + int(total[low:high].argmax()) for low, high in pairwise(edges)], dtype=np.int64)
    return Drawn(first, end, left, op_ids, lows)
