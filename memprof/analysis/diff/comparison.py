"""What changed between two recordings, or their summaries: the peak, every phase, and their parts.

The peak may lie in forward on one side and in backward on the other, so moments are compared by phase, and live bytes
are split only within a phase. The parts of a moment always sum to the whole.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from memprof.analysis.diff.gates import Gate, Verdict, measure, require_phases
from memprof.analysis.diff.moved_lines import with_moved_lines
from memprof.analysis.diff.summary import KINDS, OTHERS, PEAK, Spot, Summary, read_summary, summarise
from memprof.analysis.report.module_tree import fold_alike
from memprof.errors import InconclusiveError
from memprof.phases import in_order
from memprof.trace.files.reading import located, read_text
from memprof.trace.manifest import PREDICTED
from memprof.trace.store import Trace

#: What must match on both sides for the numbers to be comparable.
FRAME = (
    "device",
    "torch",
    "CUDA",
    "allocator settings",
    "world size",
    "batch",
    "micro-batches",
    "memory events",
    "model",
)

#: A line of code: its file, and the folder of that.
_LINE = re.compile(r"((.*[/\\])?[^/\\]*):\d+(?: \(before\))?", re.DOTALL)
_LARGEST_SUMMARY_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Change:
    """One part of the live bytes, on both sides.

    Attributes:
        name: The category, module, operator, line or storage.
        base: Its bytes in the base.
        head: Its bytes in the head.
    """

    name: str
    base: int
    head: int

    @property
    def bytes(self) -> int:
        """Bytes gained, negative for a decrease."""
        return self.head - self.base


@dataclass(frozen=True)
class Pair:
    """Corresponding moments of both sides.

    Attributes:
        name: PEAK, or the phase.
        base: The moment in the base; None where that lacks the phase.
        head: The moment in the head, likewise.
        parts: Changes by kind, also by file and folder of the line, the largest first; those of each kind sum to the
            change of the whole.
    """

    name: str
    base: Spot | None
    head: Spot | None
    parts: dict[str, tuple[Change, ...]]

    @property
    def base_bytes(self) -> int:
        """Live bytes in the base, 0 where it lacks the phase."""
        return 0 if self.base is None else self.base.bytes

    @property
    def head_bytes(self) -> int:
        """Live bytes in the head, likewise."""
        return 0 if self.head is None else self.head.bytes

    @property
    def bytes(self) -> int:
        """Bytes gained, negative for a decrease."""
        return self.head_bytes - self.base_bytes


@dataclass(frozen=True)
class Difference:
    """A difference besides the code that affects memory.

    Attributes:
        what: One of FRAME.
        base: Its value in the base, "none" where empty.
        head: Its value in the head.
    """

    what: str
    base: str
    head: str


@dataclass(frozen=True)
class Diff:
    """What changed.

    Attributes:
        base: The base; of several recordings the one with the median peak.
        head: The summary compared with it, likewise.
        bases: All summaries of the base.
        heads: All summaries of the head.
        peak: The peaks.
        phases: The fullest moments of the phases, in the order of a step.
        differences: Differences besides the code.
        verdicts: Results of the gates, those that fail the run first.
        warnings: Caveats on the figures.
        by: The only kind of parts to show; "" for KINDS.
    """

    base: Summary
    head: Summary
    bases: tuple[Summary, ...]
    heads: tuple[Summary, ...]
    peak: Pair
    phases: tuple[Pair, ...]
    differences: tuple[Difference, ...]
    verdicts: tuple[tuple[str, Verdict], ...] = ()
    warnings: tuple[str, ...] = ()
    by: str = ""

    @property
    def focus(self) -> Pair:
        """The pair to report the change in: the peaks where both lie in one phase, else the head's phase."""
        if self.base.peak.phase == self.head.peak.phase:
            return self.peak
        return next(pair for pair in self.phases if pair.name == self.head.peak.phase)

    @property
    def has_moved(self) -> bool:
        """Whether the peak moved to another phase or module."""
        return self.base.peak.place != self.head.peak.place

    @property
    def is_unchanged(self) -> bool:
        """Whether every phase is the same, part by part."""
        return all(
            not change.bytes for pair in (self.peak, *self.phases) for parts in pair.parts.values() for change in parts
        )

    @property
    def is_failed(self) -> bool:
        """Whether a gate that fails the run was exceeded."""
        return any(level == "fail" and verdict.is_failed for level, verdict in self.verdicts)


def open_side(path: str | Path) -> Summary:
    """Opens one side of a diff: a recording, or the JSON of a summary.

    Raises:
        BadInputError: The file is neither, or damaged.
        InconclusiveError: The recording contains no complete step.
    """
    path = located(path)
    if is_summary(path):
        return read_summary(read_text(path, _LARGEST_SUMMARY_BYTES), str(path))
    return summarise(Trace.open(path))


def is_summary(path: str | Path) -> bool:
    """Whether a path is a summary in JSON, judged by its first byte."""
    path = located(path)
    if path.is_fifo():  # for example a shell's <(memprof export run.memprof --to summary)
        return True
    if not path.is_file() or path.stat().st_size > _LARGEST_SUMMARY_BYTES:
        return False
    with path.open("rb") as file:
        return file.read(1) == b"{"


def compare(
    bases: Sequence[Summary],
    heads: Sequence[Summary],
    *,
    fail: Sequence[Gate] = (),
    warn: Sequence[Gate] = (),
    any_model: bool = False,
) -> Diff:
    """Compares one or more recordings per side.

    Args:
        bases: Summaries of the base, at least one.
        heads: Summaries compared with the base, at least one.
        fail: Gates that fail the run.
        warn: Gates that warn.
        any_model: Whether different models are compared, such as one and the same with adapters.

    Raises:
        InconclusiveError: The sides are of different models, unless `any_model` is set.
        UsageError: A gate names a phase that no recording has.
    """
    base, head = _median_of(bases), _median_of(heads)
    if base.model and head.model and base.model != head.model and not any_model:
        raise InconclusiveError(
            f"the recordings are not comparable: the base is of {base.model}, the head of {head.model}. "
            "To compare them anyway: memprof diff --ignore model"
        )
    require_phases((*fail, *warn), (name for one in (*bases, *heads) for name in one.spots if name != PEAK))
    names = [name for name in in_order((*base.spots, *head.spots)) if name != PEAK]
    found = Diff(
        base=base,
        head=head,
        bases=tuple(bases),
        heads=tuple(heads),
        peak=_pair(PEAK, base, head),
        phases=tuple(_pair(name, base, head) for name in names),
        differences=differences(base, head),
        warnings=tuple(_warnings(bases, heads)),
    )
    measured = partial(_measured, found=found)
    least = {
        f"least_{side}": max(one.lower_bound for one in summaries)
        for side, summaries in (("base", bases), ("head", heads))
    }
    verdicts = tuple(
        (level, gate.judge(measured(gate, bases), measured(gate, heads), **least))
        for level, gates in (("fail", fail), ("warn", warn))
        for gate in gates
    )
    return Diff(**{**vars(found), "verdicts": verdicts})


def differences(base: Summary, head: Summary) -> tuple[Difference, ...]:
    """Returns what differs besides the code.

    A batch or a model unknown on one side is not a difference, nor is a predicted side.
    """
    sides = [{**side.frame, "model": side.model} for side in (base, head)]
    pairs = [(what, *(side.get(what, "") for side in sides)) for what in FRAME]
    return tuple(
        Difference(what, one or "none", other or "none")
        for what, one, other in pairs
        if one != other and (what not in ("batch", "model") or (one and other)) and PREDICTED not in (one, other)
    )


def _measured(gate: Gate, side: Sequence[Summary], found: Diff) -> float:
    phase = found.focus.name
    values = [measure(gate, summary, summary.spots.get(phase)) for summary in side]
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def _median_of(side: Sequence[Summary]) -> Summary:
    ordered = sorted(side, key=lambda summary: summary.peak.bytes)
    return ordered[(len(ordered) - 1) // 2]


def _pair(name: str, base: Summary, head: Summary) -> Pair:
    one, other = base.spots.get(name), head.spots.get(name)
    before, after = ({} if spot is None else spot.parts for spot in (one, other))
    if one is not None and other is not None:
        before = {**before, "source": with_moved_lines(before["source"], after["source"])}
    parts = {kind: _changes(before.get(kind, {}), after.get(kind, {})) for kind in KINDS}
    places = {kind: _summed(parts["source"], depth) for depth, kind in enumerate(("file", "folder"))}
    return Pair(name, one, other, parts | places)


def _summed(lines: Sequence[Change], depth: int) -> tuple[Change, ...]:
    """Sums the changes of lines of code by what they are in: their file (depth 0), or its folder (1)."""
    sums: dict[str, list[Change]] = {}
    for one in lines:
        found = _LINE.fullmatch(one.name)
        place = one.name if found is None else found[1] if not depth else found[2] or "./"
        sums.setdefault(place, []).append(one)
    parts = [Change(name, sum(one.base for one in held), sum(one.head for one in held)) for name, held in sums.items()]
    return tuple(sorted(parts, key=lambda one: (-abs(one.bytes), -one.head, one.name)))


def _changes(base: Mapping[str, int], head: Mapping[str, int]) -> tuple[Change, ...]:
    """Pairs the parts of two sides; parts summed as "other" on one side are summed on the other too."""
    base, head = _folded(base, head), _folded(head, base)
    sizes = ((name, base.get(name, 0), head.get(name, 0)) for name in {**base, **head})
    # Tuples sort faster than Change objects, and there may be a hundred thousand.
    ordered = sorted((-abs(after - before), -after, name, before) for name, before, after in sizes)
    return tuple(Change(name, before, -after) for _, after, name, before in ordered)


def fold_layers(found: Sequence[Change]) -> tuple[Change, ...]:
    """Sums the changes of repeated layers that changed alike, ``layers.0-11.mlp.0``; the largest is first."""
    sizes = {one.name: (one.base, one.head) for one in found}
    summed = [
        Change(title, len(names) * sizes[names[0]][0], len(names) * sizes[names[0]][1])
        for title, names in fold_alike(sizes)
    ]
    return tuple(sorted(summed, key=lambda one: -abs(one.bytes)))


def _folded(parts: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    if OTHERS not in other:
        return dict(parts)
    kept = {name: size for name, size in parts.items() if name in other and name != OTHERS}
    rest = sum(parts.values()) - sum(kept.values())
    return kept | ({OTHERS: rest} if rest else {})


def _warnings(bases: Sequence[Summary], heads: Sequence[Summary]) -> list[str]:
    warnings = []
    for side, summaries in (("base", bases), ("head", heads)):
        if not all(summary.is_complete for summary in summaries):
            warnings.append(f"the recording of the {side} is incomplete.")
        peaks = [summary.peak.bytes for summary in summaries]
        if len(peaks) > 1 and max(peaks) > min(peaks):
            spread = (max(peaks) - min(peaks)) / statistics.median(peaks)
            warnings.append(f"the {len(peaks)} recordings of the {side} differ by {100 * spread:.2f} % in peak.")
    return warnings
