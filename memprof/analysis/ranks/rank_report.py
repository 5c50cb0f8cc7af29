"""Compares the ranks of a job: the worst one, their spread, and its causes, without reading their tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memprof.phases import in_order
from memprof.trace.files.coded import Coded
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.manifest import Manifest
from memprof.trace.schema import NONE, Ints, RankCurve, RankMoments, RankParts, Ranks
from memprof.trace.store import Trace

#: Lists with more numbers than this show only a count.
_NAMED = 12


@dataclass(frozen=True)
class RankPeak:
    """One rank, at the peak of its fullest step.

    Attributes:
        rank: Its number.
        node: Its machine, "" where unknown.
        device: The device with most of its bytes.
        step: Number of its fullest step, None where it ran no operators.
        peak_bytes: Bytes allocated at the peak; None likewise.
        reserved_bytes: Peak reserved bytes of the step; None where the allocator has none, as on CPU.
        op_id: Operator of the peak, its index in that step; None where it ran no operators.
        phase: Phase of the peak.
        op: Operator of the peak.
        module: Qualified name of its module, "" outside any module.
        step_time_us: Step time without the recorder, NaN where unknown.
        ends_at: Where its recording ends early, and why; "" where it is complete.
        same_ranks: In dry runs, other ranks that do the same, and were not run.
    """

    rank: int
    node: str
    device: str
    step: int | None
    peak_bytes: int | None
    reserved_bytes: int | None
    op_id: int | None
    phase: str
    op: str
    module: str
    step_time_us: float
    ends_at: str
    same_ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Spread:
    """The spread of one quantity over the ranks.

    Attributes:
        name: The phase, category or module; "" for the peak, and for memory outside any module.
        least: Minimum bytes over the ranks.
        median: Bytes of the median rank.
        most: Maximum bytes over the ranks.
        least_rank: Rank with the minimum, the lowest on ties.
        most_rank: Rank with the maximum, likewise.
    """

    name: str
    least: int
    median: int
    most: int
    least_rank: int
    most_rank: int

    @property
    def bytes(self) -> int:
        """Maximum minus minimum bytes."""
        return self.most - self.least

    @property
    def imbalance(self) -> float:
        """Excess of the maximum over the median, as a share of the median; infinite where that is 0."""
        if self.most == self.median:
            return 0.0
        return (self.most - self.median) / self.median if self.median else float("inf")


@dataclass(frozen=True)
class RankComparison:
    """The ranks of a job, side by side.

    Attributes:
        ranks: Each rank, lowest first.
        worst: The rank with the highest peak, the lowest on ties; None where no rank ran operators.
        peak: Spread of the peaks; None where no rank ran operators.
        phases: Spread of the fullest moment of each phase.
        categories: Spread of each category at each rank's own peak, the largest first.
        modules: Spread of each module that owns or allocated memory, likewise.
    """

    ranks: tuple[RankPeak, ...]
    worst: int | None
    peak: Spread | None
    phases: tuple[Spread, ...]
    categories: tuple[Spread, ...]
    modules: tuple[Spread, ...]


def compare_ranks(trace: Trace) -> RankComparison:
    """Compares the ranks of a trace by the summaries in its files.

    Raises:
        BadInputError: A table is damaged.
    """
    ranks, moments, parts = trace.summary(Ranks), trace.summary(RankMoments), trace.summary(RankParts)
    is_dry = trace.manifest.backend.name == DRY_RUN
    same_ranks = {rank: trace.manifest_of(rank).same_ranks for rank in trace.ranks} if is_dry else {}
    peaks = _peaks(ranks, moments, same_ranks)
    known = np.array([one.rank for one in peaks if one.peak_bytes is not None], dtype=np.int64)
    sizes = np.array([one.peak_bytes for one in peaks if one.peak_bytes is not None], dtype=np.int64)
    phases = []
    names = np.array(moments.phase, dtype=np.str_)
    order = np.argsort(names, kind="stable")  # ranks may have thousands of phases in total
    for phase in in_order(moments.phase.tolist()):
        first, end = (int(np.searchsorted(names, phase, side, order)) for side in ("left", "right"))
        rows = order[first:end]
        phases.append(_spread(phase, moments.rank[rows], moments.allocated_bytes[rows]))
    whole = _spread("", known, sizes) if len(known) else None
    return RankComparison(
        ranks=peaks,
        worst=None if whole is None else whole.most_rank,
        peak=whole,
        phases=tuple(phases),
        categories=_part_spreads(parts, "category", known),
        modules=_part_spreads(parts, "module", known),
    )


@dataclass(frozen=True, eq=False)
class RankCurves:
    """Peak live bytes in each stretch of the ranks' fullest steps, each cut into equally many operators.

    Attributes:
        ranks: The ranks that ran operators, shape ``(ranks,)``.
        bytes: The curves, shape ``(ranks, stretches)``; a step with fewer operators repeats values.
    """

    ranks: Ints
    bytes: Ints


def read_curves(trace: Trace) -> RankCurves:
    """Reads the curves of all ranks from the summaries in the files.

    Raises:
        BadInputError: A table is damaged.
    """
    curve = trace.summary(RankCurve)
    order = np.lexsort((curve.place, curve.rank))
    ranks, counts = np.unique(curve.rank, return_counts=True)
    width = int(counts.max(initial=0))
    starts = np.cumsum(counts) - counts
    places = (np.arange(width)[None, :] * counts[:, None]) // max(width, 1)
    return RankCurves(ranks, curve.allocated_bytes[order][starts[:, None] + places])


def job_notes(trace: Trace, *, is_part: bool = False) -> tuple[str, ...]:
    """Returns a sentence for each missing or inconsistent part of a job with several processes.

    Args:
        trace: The recording.
        is_part: Whether it is known to be a single node or rank, so that the others are not missing.
    """
    manifests = [trace.manifest_of(rank) for rank in trace.ranks]
    sizes = sorted({manifest.world_size for manifest in manifests})
    if sizes[-1] == 1:
        return ()
    notes = []
    if len(sizes) > 1:
        notes.append(
            f"These are recordings of different jobs, with {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks."
        )
    elif not is_part and (missing := sorted(set(range(sizes[0])) - set(trace.ranks))):
        few, are, them = ("rank", "is", "it") if len(missing) == 1 else ("ranks", "are", "them")
        notes.append(
            _dry_ranks(sizes[0], manifests)
            if all(manifest.backend.name == DRY_RUN for manifest in manifests)
            else f"Of {sizes[0]} ranks, {few} {name_numbers(missing)} {are} missing: there is no recording of {them} "
            "here."
        )
    for what, versions in (
        ("memprof", {manifest.memprof_version for manifest in manifests}),
        ("torch", {manifest.torch_version for manifest in manifests}),
    ):
        if len(versions) > 1:
            notes.append(f"The ranks were recorded with different versions of {what}: {', '.join(sorted(versions))}.")
    notes += _early_ends(trace.summary(Ranks))
    return tuple(notes)


def _dry_ranks(world_size: int, manifests: Sequence[Manifest]) -> str:
    """Returns which ranks of a job were dry-run, and which of the others do the same as one of these."""
    if len(manifests) == 1 and not manifests[0].same_ranks:
        return f"Of {world_size} ranks, only rank {manifests[0].rank} was dry-run."
    alone = [one.rank for one in manifests if not one.same_ranks]
    sets = [(one.rank, (*one.same_ranks, one.rank)) for one in manifests if one.same_ranks]
    parts = [f"rank {rank} for ranks {name_numbers(ranks)}, which do the same" for rank, ranks in sets]
    parts += [f"rank{'s' * (len(alone) > 1)} {name_numbers(alone)}"] if alone else []
    between = [(one.rank, one.between) for one in manifests if one.between.ranks]
    skipped = {rank for _, held in between for rank in held.ranks}
    if between:
        ends = {rank for one, held in between for rank in (one, held.other)}
        are = "ranks {} are" if len(skipped) > 1 else "rank {} is"
        parts.append(
            f"{are.format(name_numbers(skipped))} like ranks {name_numbers(ends)}, except for the number of stored "
            "micro-batches, which is between theirs"
        )
    unknown = set(range(world_size)).difference(alone, skipped, *(ranks for _, ranks in sets))
    rest = f" Rank{'s' * (len(unknown) > 1)} {name_numbers(unknown)} may differ from these." if unknown else ""
    were = "1 was" if len(manifests) == 1 else f"{len(manifests)} were"
    return f"Of {world_size} ranks, {were} dry-run: {'; '.join(parts)}.{rest}"


def name_numbers(numbers: Iterable[int]) -> str:
    """Formats a list of numbers: ``0, 2 to 5 and 9``; long lists are shortened."""
    ordered = sorted(set(numbers))
    edges = [place for place in range(1, len(ordered)) if ordered[place] != ordered[place - 1] + 1]
    pieces = []
    for first, end in zip([0, *edges], [*edges, len(ordered)], strict=True):
        low, high = ordered[first], ordered[end - 1]
        pieces += [str(low)] if low == high else [f"{low} to {high}"] if high > low + 1 else [str(low), str(high)]
    if len(pieces) > _NAMED:
        return f"{', '.join(pieces[:_NAMED])} and more, {len(ordered)} together"
    return f"{', '.join(pieces[:-1])} and {pieces[-1]}" if len(pieces) > 1 else pieces[0]


def _early_ends(ranks: Ranks) -> list[str]:
    """Reports which ranks end early, the earliest first, and which stopped while others continued."""
    notes = []
    early = np.flatnonzero(~ranks.is_complete)
    if len(early) and len(ranks) > 1:
        first = int(early[np.lexsort((ranks.rank[early], ranks.last_step[early]))[0]])
        which = f"rank {ranks.rank[first]} {_ended(ranks, first)}"
        others = sorted(set(ranks.rank[early].tolist()) - {int(ranks.rank[first])})
        more = f"; so does that of rank{'s' * (len(others) > 1)} {name_numbers(others)}" if others else ""
        notes.append(f"The recording of {which}{more}.")
    behind = np.flatnonzero(ranks.is_complete & (ranks.last_step >= 0) & (ranks.last_step < ranks.last_step.max()))
    if len(behind):
        furthest = int(ranks.last_step.max())
        stopped = ", ".join(
            f"rank {ranks.rank[row]} after step {ranks.last_step[row]}" for row in behind[:_NAMED].tolist()
        )
        notes.append(f"Stopped early: {stopped}; others continued to step {furthest}.")
    return notes


def _ended(ranks: Ranks, row: int) -> str:
    place = str(ranks.ends_at[row])
    return f"ends early, in {place}" if place.startswith("step") else f"ends early ({place})" if place else "ends early"


def _peaks(ranks: Ranks, moments: RankMoments, same_ranks: Mapping[int, tuple[int, ...]]) -> tuple[RankPeak, ...]:
    whole = np.flatnonzero(moments.phase == "")
    row_of = dict(zip(moments.rank[whole].tolist(), whole.tolist(), strict=True))
    peaks = []
    for row in np.argsort(ranks.rank, kind="stable").tolist():
        rank = int(ranks.rank[row])
        at = row_of.get(rank)
        peaks.append(
            RankPeak(
                rank=rank,
                node=str(ranks.node[row]),
                device=str(ranks.device[row]),
                step=_or_none(int(ranks.step[row])),
                op_id=None if at is None else int(moments.op_id[at]),
                peak_bytes=_or_none(int(ranks.peak_bytes[row])),
                reserved_bytes=_or_none(int(ranks.reserved_bytes[row])),
                phase="" if at is None else str(moments.in_phase[at]),
                op="" if at is None else str(moments.name[at]),
                module="" if at is None else str(moments.module[at]),
                step_time_us=float(ranks.step_time_us[row]),
                ends_at=str(ranks.ends_at[row]),
                same_ranks=same_ranks.get(rank, ()),
            )
        )
    return tuple(peaks)


def _or_none(value: int) -> int | None:
    return None if value == NONE else value


def _spread(name: str, ranks: Ints, sizes: Ints) -> Spread:
    order = np.argsort(ranks, kind="stable")
    ranks, sizes = ranks[order], sizes[order]
    least, most = int(np.argmin(sizes)), int(np.argmax(sizes))
    return Spread(
        name=name,
        least=int(sizes[least]),
        median=int(np.median(sizes)),
        most=int(sizes[most]),
        least_rank=int(ranks[least]),
        most_rank=int(ranks[most]),
    )


def _part_spreads(parts: RankParts, kind: str, ranks: Ints) -> tuple[Spread, ...]:
    """Compares the bytes of each part over all ranks that ran operators; a rank without it counts as 0."""
    parts = parts.take((parts.kind == kind) & np.isin(parts.rank, ranks))
    coded = Coded.of(parts.name)
    held = np.zeros((len(coded.distinct), len(ranks)), dtype=np.int64)
    np.add.at(held, (coded.codes, np.searchsorted(ranks, parts.rank)), parts.allocated_bytes)
    spreads = [_spread(str(name), ranks, row) for name, row in zip(coded.distinct, held, strict=True)]
    return tuple(sorted(spreads, key=lambda one: (-one.bytes, -one.most, one.name)))
