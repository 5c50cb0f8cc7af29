"""Compares what a real device allocated with what a dry run did, aligned by the allocations' sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memprof.analysis.compared.allocation_sequence import AllocationSequence
from memprof.trace.schema import Ints

#: Allocations by which the place of one sequence in another is found.
_HEAD = 64
#: Kinds of differences.
MISSING, EXTRA, RESIZED = "missing", "extra", "another size"
#: Allocations aligned at a time: the table of a piece takes an eighth of its square in bytes.
_PIECE = 30_000
#: The last part of a piece is aligned again with the next one: what would match there may not be in sight yet.
_AGAIN = _PIECE // 5


@dataclass(frozen=True)
class Difference:
    """Allocations that differ alike.

    Attributes:
        kind: MISSING in the dry run, EXTRA there, or of ANOTHER SIZE.
        operator: The operator that made them, such as ``mm``; "" where unknown.
        place: File and line of the first; "" where unknown.
        is_backward: Whether they were made in backward.
        real_bytes: Bytes of one in the real run; 0 if it is extra.
        dry_bytes: Bytes of one in the dry run; 0 if it is missing.
        count: How many there are.
        first: Index of the first in the real sequence; where it is extra, of the allocation before which it is.
    """

    kind: str
    operator: str
    place: str
    is_backward: bool
    real_bytes: int
    dry_bytes: int
    count: int
    first: int

    @property
    def total_bytes(self) -> int:
        """Bytes by which all of them differ."""
        return abs(self.dry_bytes - self.real_bytes) * self.count


@dataclass(frozen=True)
class Unequal:
    """One allocation that differs.

    Attributes:
        kind: MISSING in the dry run, EXTRA there, or of ANOTHER SIZE.
        real: Index in the real sequence; -1 if it is extra.
        dry: Index in the dry run's; -1 if it is missing.
        at: Index in the real sequence; where it is extra, of the allocation before which it is.
    """

    kind: str
    real: int
    dry: int
    at: int


@dataclass(frozen=True, eq=False)
class AllocationComparison:
    """Two sequences of allocations, aligned.

    Attributes:
        real: The real device's.
        dry: The dry run's.
        gaps: Where they differ.
        unequal: The allocations in these, one by one, in order.
        differences: The same, like ones counted together, largest first.
        equal_in_any_order: How many of the real allocations the dry run has too, whatever the order.
    """

    real: AllocationSequence
    dry: AllocationSequence
    gaps: tuple[Gap, ...]
    unequal: tuple[Unequal, ...]
    differences: tuple[Difference, ...]
    equal_in_any_order: int

    @property
    def equal(self) -> int:
        """How many of the real allocations the dry run has too, in the same order."""
        return len(self.real) - sum(gap.real_to - gap.real_from for gap in self.gaps)

    @property
    def peak_error_bytes(self) -> int:
        """By how much the dry run's peak is higher."""
        return self.dry.peak_bytes - self.real.peak_bytes

    @property
    def reserved_error_bytes(self) -> int | None:
        """By how much the dry run's peak of reserved bytes is higher; None where a side lacks it."""
        if self.real.peak_reserved_bytes <= 0 or self.dry.peak_reserved_bytes <= 0:
            return None
        return self.dry.peak_reserved_bytes - self.real.peak_reserved_bytes

    def peak_is_within(self, tolerance: float) -> bool:
        """Whether the peaks differ by at most a share of the real one, such as 0.01."""
        return abs(self.peak_error_bytes) <= tolerance * self.real.peak_bytes


def compare_sequences(real: AllocationSequence, dry: AllocationSequence) -> AllocationComparison:
    """Aligns two sequences and counts their differences.

    Where memprof chose the part of the job that one side holds, and the job that of the other, only the part that both
    have is compared.
    """
    if real.is_window != dry.is_window:
        real, dry = _common_part(real, dry)
    gaps = find_gaps(real.sizes, dry.sizes)
    counts = Counter(real.sizes.tolist()), Counter(dry.sizes.tolist())
    unequal = tuple(_unequal(real, dry, gaps))
    return AllocationComparison(
        real=real,
        dry=dry,
        gaps=tuple(gaps),
        unequal=unequal,
        differences=tuple(_differences(real, dry, unequal)),
        equal_in_any_order=(counts[0] & counts[1]).total(),
    )


def _common_part(real: AllocationSequence, dry: AllocationSequence) -> tuple[AllocationSequence, AllocationSequence]:
    """Cuts the longer sequence to the place where the shorter one begins, and both to the same length."""
    length = min(len(real), len(dry))
    if len(real) > length:
        start = _place_of(dry.sizes, real.sizes)
        return _cut(real, start, min(start + length, len(real))), dry
    start = _place_of(real.sizes, dry.sizes)
    return real, _cut(dry, start, min(start + length, len(dry)))


def _place_of(part: Ints, whole: Ints) -> int:
    """Returns where the beginning of a sequence is most like a part of a longer one."""
    head = part[:_HEAD]
    if not len(head):
        return 0
    equal = np.lib.stride_tricks.sliding_window_view(whole, len(head)) == head
    return int(equal.sum(axis=1).argmax())


def _cut(sequence: AllocationSequence, start: int, stop: int) -> AllocationSequence:
    if stop <= start or (start == 0 and stop == len(sequence)):
        return sequence
    part = slice(start, stop)
    return replace(
        sequence,
        sizes=sequence.sizes[part],
        operators=sequence.operators[part],
        places=sequence.places[part],
        is_backward=sequence.is_backward[part],
        live=sequence.live[part],
        start_bytes=int(sequence.live[start] - sequence.sizes[start]),
        end_bytes=sequence.end_bytes if stop == len(sequence) else int(sequence.live[stop - 1]),
    )


def _unequal(real: AllocationSequence, dry: AllocationSequence, gaps: Sequence[Gap]) -> Iterator[Unequal]:
    for gap in gaps:
        ours = list(range(gap.dry_from, gap.dry_to))
        for row in range(gap.real_from, gap.real_to):
            twin = next((other for other in ours if _is_same_origin(real, row, dry, other)), -1)
            if twin >= 0:
                ours.remove(twin)
            yield Unequal(MISSING if twin < 0 else RESIZED, row, twin, row)
        for row in ours:
            yield Unequal(EXTRA, -1, row, gap.real_from)


def _differences(real: AllocationSequence, dry: AllocationSequence, unequal: Sequence[Unequal]) -> list[Difference]:
    found: dict[tuple[str, str, str, bool, int, int], list[int]] = {}
    for one in unequal:
        origin = _origin(dry, one.dry) if one.real < 0 else _origin(real, one.real)
        sizes = (int(real.sizes[one.real]) if one.real >= 0 else 0, int(dry.sizes[one.dry]) if one.dry >= 0 else 0)
        found.setdefault((one.kind, *origin, *sizes), []).append(one.at)
    differences = [Difference(*key, count=len(rows), first=rows[0]) for key, rows in found.items()]
    return sorted(differences, key=lambda one: (-one.total_bytes, one.first))


def _origin(sequence: AllocationSequence, row: int) -> tuple[str, str, bool]:
    return sequence.operators[row], sequence.places[row], bool(sequence.is_backward[row])


def _is_same_origin(real: AllocationSequence, row: int, dry: AllocationSequence, other: int) -> bool:
    """Whether two allocations in one gap stand for each other: the same operator, or where unknown the same line."""
    names = real.operators[row], dry.operators[other]
    if all(names):
        return names[0] == names[1]
    places = real.places[row], dry.places[other]
    return bool(places[0]) and places[0] == places[1]


def peak_allocation(sequence: AllocationSequence) -> str:
    """Returns what was allocated at the peak, in words: operator and line."""
    at = sequence.peak_at
    if at < 0:
        return "at the beginning"
    return " in ".join(part for part in (sequence.operators[at], sequence.places[at]) if part) or f"allocation {at:,}"


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
    from rapidfuzz.distance import LCSseq  # of an extra

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
