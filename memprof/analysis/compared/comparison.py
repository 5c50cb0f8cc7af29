"""Compares what a real device allocated with what a dry run did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memprof.analysis.compared.alignment import Gap, find_gaps
from memprof.analysis.compared.allocation_sequence import AllocationSequence
from memprof.trace.schema import Ints

#: Allocations by which the place of one sequence in another is found.
_HEAD = 64
#: Kinds of differences.
MISSING, EXTRA, RESIZED = "missing", "extra", "another size"


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
