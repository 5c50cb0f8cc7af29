"""Aligns two sequences of allocations by their sizes: a longest common subsequence, in pieces where they are long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rapidfuzz.distance import LCSseq

from memprof.trace.schema import Ints

#: Allocations aligned at a time: the table of a piece takes an eighth of its square in bytes.
_PIECE = 30_000
#: The last part of a piece is aligned again with the next one: what would match there may not be in sight yet.
_AGAIN = _PIECE // 5


@dataclass(frozen=True)
class Gap:
    """A place where two sequences differ.

    Attributes:
        real_from: First allocation of the real sequence in the gap.
        real_to: The one after its last.
        dry_from: First allocation of the dry run in the gap.
        dry_to: The one after its last.
    """

    real_from: int
    real_to: int
    dry_from: int
    dry_to: int


def find_gaps(real: Ints, dry: Ints) -> list[Gap]:
    """Returns where two sequences differ, in order; all else is equal, pair by pair.

    Args:
        real: Bytes of each allocation of the one, shape ``(allocations,)``.
        dry: The same of the other.
    """
    gaps: list[Gap] = []
    at_real = at_dry = 0
    while at_real < len(real) or at_dry < len(dry):
        one, other = real[at_real : at_real + _PIECE].tolist(), dry[at_dry : at_dry + _PIECE].tolist()
        is_last = at_real + len(one) == len(real) and at_dry + len(other) == len(dry)
        used_real, used_dry = len(one), len(other)
        pairs = [
            (step.src_start, step.src_end, step.dest_start, step.dest_end)
            for step in LCSseq.opcodes(one, other)
            if step.tag == "equal"
        ]
        if not is_last:
            kept = [pair for pair in pairs if pair[1] <= _PIECE - _AGAIN and pair[3] <= _PIECE - _AGAIN]
            if kept:
                pairs = kept
                used_real, used_dry = kept[-1][1], kept[-1][3]
        ends = [*pairs, (used_real, used_real, used_dry, used_dry)]
        last_real = last_dry = 0
        for real_from, real_to, dry_from, dry_to in ends:
            if real_from > last_real or dry_from > last_dry:
                gaps.append(Gap(at_real + last_real, at_real + real_from, at_dry + last_dry, at_dry + dry_from))
            last_real, last_dry = real_to, dry_to
        at_real, at_dry = at_real + used_real, at_dry + used_dry
    return gaps


def common_positions(gaps: Sequence[Gap], real: int, dry: int) -> tuple[Ints, Ints, int]:
    """Places two aligned sequences on one axis: equal pairs share a position, a gap takes those of its longer side.

    Args:
        gaps: Where they differ, in order.
        real: Number of allocations of the one.
        dry: Number of allocations of the other.

    Returns:
        The position of each allocation of the one, shape ``(real,)``, and of the other, shape ``(dry,)``, both rising;
        and the number of positions.
    """
    shifts = np.zeros(real + 1, dtype=np.int64), np.zeros(dry + 1, dtype=np.int64)
    for gap in gaps:
        longer = (gap.dry_to - gap.dry_from) - (gap.real_to - gap.real_from)
        shifts[0][gap.real_to] += max(longer, 0)
        shifts[1][gap.dry_to] += max(-longer, 0)
    one, other = (np.arange(len(shift)) + np.cumsum(shift) for shift in shifts)
    return one[:-1], other[:-1], int(one[-1])
