"""Decides which ranks of a job must be dry-run, and which of the others do the same as one of these.

Ranks have coordinates in the grid that the job's process groups span. Shards of a tensor only get smaller along each
dimension of the grid, so where the ranks in two opposite corners of a box ran the same operators on the same sizes, the
ranks between them do so, too. Where the corners differ, the box is cut: after the first rank, before the last one, then
into halves. A dimension along which ranks send tensors to one another (the stages of a pipeline) is cut at every place,
except where stages are known to differ only in how many micro-batches they store (`find_stretches`).

Where stages run the same operators on the same sizes for a micro-batch, each moment of a rank's step holds a fixed
number of bytes and so many for each stored micro-batch. The peak, the highest of these moments, is then a convex
function of the number of stored micro-batches: between two ranks it is at most on the straight line, and it is exactly
on it where a third rank between them is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memprof.trace.files.rank_roles import RankRole, StageSurvey

#: Fewest consecutive stages of which any is left out: three are run.
_LEAST = 4
#: Maximum number of stages that are surveyed; each is started for it.
_MOST = 128


@dataclass(frozen=True)
class Stretch:
    """Consecutive stages, of which only some are run.

    Attributes:
        run: The ranks that are run: the first, one in the middle and the last.
        skipped: The ranks between two of these, for each of the first two.
    """

    run: tuple[int, int, int]
    skipped: tuple[tuple[int, ...], tuple[int, ...]]


def unsurveyed(
    stages: Sequence[int], known: Mapping[int, RankRole], surveys: Mapping[int, StageSurvey]
) -> list[int] | None:
    """Returns the ranks whose survey is missing; None if the stages cannot be surveyed, and all must be run."""
    were_run = [rank for rank in (stages[0], stages[-1]) if rank in known]
    if not _LEAST <= len(stages) <= _MOST or not were_run or any(rank not in surveys for rank in were_run):
        return None
    missing = [rank for rank in stages if rank not in surveys]
    return None if any(rank in known for rank in missing) else missing


def find_stretches(
    stages: Sequence[int], known: Mapping[int, RankRole], surveys: Mapping[int, StageSurvey]
) -> list[Stretch]:
    """Returns the stretches of stages that are alike; all other stages must be run.

    A stretch whose three ranks were run and did not run the same operators is none.

    Args:
        stages: A rank of each stage, in order; all have been surveyed.
        known: Roles of ranks that were dry-run.
        surveys: Their surveys.
    """
    found = []
    for _, group in itertools.groupby(stages, key=lambda rank: surveys[rank].digest):
        alike = list(group)
        if len(alike) < _LEAST or not _is_ordered([surveys[rank].stored for rank in alike]):
            continue
        middle = len(alike) // 2
        run = alike[0], alike[middle], alike[-1]
        if len({known[rank].total for rank in run if rank in known}) <= 1:
            found.append(Stretch(run, (tuple(alike[1:middle]), tuple(alike[middle + 1 : -1]))))
    return found


def share_between(rank: int, first: int, other: int, surveys: Mapping[int, StageSurvey]) -> float:
    """Returns where a rank is between two others by its stored micro-batches, from 0 (as the first) to 1."""
    start, end = surveys[first].stored, surveys[other].stored
    return (surveys[rank].stored - start) / (end - start) + 0.0 if end != start else 0.0  # no negative zero


def _is_ordered(numbers: Collection[int]) -> bool:
    pairs = list(itertools.pairwise(numbers))
    return all(one <= other for one, other in pairs) or all(one >= other for one, other in pairs)


#: Once this many ranks have run and more than this share of their roles are distinct, most of the rest differ too.
_SAMPLE, _MANY = 6, 0.7
#: A box of ranks: the first coordinate and the one after the last, for each dimension.
_Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Grid:
    """The ranks of a job in the dimensions of its process groups.

    Attributes:
        sizes: Extent of each dimension.
        places: Coordinates of each rank, shape ``(ranks, dimensions)``.
    """

    sizes: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(world_size: int, groups: Sequence[Sequence[int]]) -> Grid:
        """Returns the grid that process groups span; a single dimension where they span none.

        Args:
            world_size: Ranks of the job.
            groups: Global ranks of each group, in order of creation.
        """
        sizes: tuple[int, ...] = ()
        places: list[tuple[int, ...]] = [()] * world_size
        for family in _families(world_size, groups):
            size = len(family[0])
            fresh = list(places)
            for members in family:
                for place, rank in enumerate(members):
                    fresh[rank] = (*places[rank], place)
            if len(set(fresh)) == len(set(places)) * size:
                places, sizes = fresh, (*sizes, size)
        if math.prod(sizes) == world_size:
            return Grid(sizes, tuple(places))
        # Ranks in the same place of all groups: numbered as one more dimension.
        if world_size % math.prod(sizes) == 0:
            counts: dict[tuple[int, ...], itertools.count[int]] = {}
            places = [(next(counts.setdefault(place, itertools.count())), *place) for place in places]
            return Grid((world_size // math.prod(sizes), *sizes), tuple(places))
        return Grid((world_size,), tuple((rank,) for rank in range(world_size)))


@dataclass
class Roles:
    """Which ranks do the same, as far as it is known yet.

    Attributes:
        same: For each rank that was dry-run, those that do the same, including itself.
        wanted: Ranks that must be dry-run next, in order; empty once all are known.
        surveyed: Ranks that must run until they have written their survey.
        between: For each rank that was dry-run, the values of its `Between` if it has one.
    """

    same: dict[int, list[int]] = field(default_factory=dict)
    wanted: list[int] = field(default_factory=list)
    surveyed: list[int] = field(default_factory=list)
    between: dict[int, dict[str, Any]] = field(default_factory=dict)


def find_roles(
    grid: Grid, known: Mapping[int, RankRole], most: int, surveys: Mapping[int, StageSurvey] | None = None
) -> Roles:
    """Returns what is known about all ranks, given those that were dry-run.

    Args:
        grid: The ranks.
        known: Roles of the ranks that were dry-run.
        most: Maximum number of ranks that are dry-run; half of it where most of them differ, as with batches of random
            sizes: others would differ likewise. Ranks that stay unknown are in no list of ``same``.
        surveys: Surveys of pipeline stages so far.
    """
    surveys = surveys or {}
    stretches: list[tuple[Stretch, list[list[int]]]] = []
    rank_at = {place: rank for rank, place in enumerate(grid.places)}
    lines = _lines_of_peers(grid, known.values())
    roles = Roles()
    open_boxes: list[_Box] = [tuple((0, size) for size in grid.sizes)]
    while open_boxes:
        box = open_boxes.pop(0)
        low = rank_at[tuple(first for first, _ in box)]
        high = rank_at[tuple(end - 1 for _, end in box)]
        if missing := [rank for rank in dict.fromkeys((low, high)) if rank not in known]:
            roles.wanted += [rank for rank in missing if rank not in roles.wanted]
        elif known[low].does_as(known[high]):
            for rank in _ranks_in(box, rank_at):
                roles.same.setdefault(rank if rank in known else low, []).append(rank)
        else:
            parts = _cut(box, grid.sizes, lines)
            slabs = [_ranks_in(part, rank_at) for part in parts]
            stages = [slab[0] for slab in slabs]
            asked = unsurveyed(stages, known, surveys) if _is_staged(box, lines) else None
            if asked:
                roles.surveyed += asked
                continue
            found = find_stretches(stages, known, surveys) if asked is not None else []
            skipped = {rank for stretch in found for ranks in stretch.skipped for rank in ranks if rank not in known}
            open_boxes += [part for part, rank in zip(parts, stages, strict=True) if rank not in skipped]
            stretches += [(stretch, slabs) for stretch in found]
    for stretch, slabs in stretches:
        _place(stretch, slabs, known, surveys, roles)
    if not lines and len(known) >= _SAMPLE:
        distinct: list[RankRole] = []
        for role in known.values():
            if not any(role.does_as(other) for other in distinct):
                distinct.append(role)
        most //= 2 if len(distinct) > _MANY * len(known) else 1
    roles.wanted = _spread(roles.wanted, max(0, most - len(known)))
    return roles


def _ranks_in(box: _Box, rank_at: Mapping[tuple[int, ...], int]) -> list[int]:
    """Returns the ranks in a box, that of its first corner first."""
    return [rank_at[place] for place in itertools.product(*(range(first, end) for first, end in box))]


def _is_staged(box: _Box, lines: Collection[int]) -> bool:
    return any(box[axis][1] - box[axis][0] > 1 for axis in lines)


def _place(
    stretch: Stretch,
    slabs: Sequence[Sequence[int]],
    known: Mapping[int, RankRole],
    surveys: Mapping[int, StageSurvey],
    roles: Roles,
) -> None:
    """Notes the ranks of stages that were skipped: as the same as a rank that was run, or between two of these."""
    represented = {rank: one for one, ranks in roles.same.items() for rank in ranks}
    slab_of = {slab[0]: slab for slab in slabs}
    for skipped, (first, other) in zip(stretch.skipped, itertools.pairwise(stretch.run), strict=True):
        for stage in skipped:
            if stage in known:  # it ended before it was known to be like others
                continue
            share = share_between(stage, first, other, surveys)
            for rank, like, unlike in zip(slab_of[stage], slab_of[first], slab_of[other], strict=True):
                if like not in represented or unlike not in represented:
                    continue  # not run yet
                one, second = represented[like], represented[unlike]
                if known[one].digest == known[second].digest:
                    roles.same[one].append(rank)
                    continue
                between = roles.between.setdefault(one, {"ranks": [], "other": second, "shares": []})
                between["ranks"].append(rank)
                between["shares"].append(share)


def _spread(ranks: Sequence[int], most: int) -> list[int]:
    """Returns at most a number of ranks, at equal distances."""
    if len(ranks) <= most:
        return list(ranks)
    return [ranks[(2 * place + 1) * len(ranks) // (2 * most)] for place in range(most)]


def _families(world_size: int, groups: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Returns sets of disjoint groups of one size that cover all ranks, the smallest groups first."""
    by_size: dict[int, list[Sequence[int]]] = {}
    for group in groups:
        if 1 < len(group) < world_size:
            by_size.setdefault(len(group), []).append(group)
    families = []
    for size in sorted(by_size):
        family: list[Sequence[int]] = []
        covered: set[int] = set()
        for group in by_size[size]:
            if not covered.isdisjoint(group):
                family, covered = [], set()
            family.append(group)
            covered |= set(group)
            if len(covered) == world_size:
                families.append(family)
                family, covered = [], set()
    return families


def _lines_of_peers(grid: Grid, roles: Collection[RankRole]) -> set[int]:
    """Returns the dimensions along which ranks send tensors to one another."""
    lines = set()
    for role in roles:
        for peer in role.peers:
            here, there = grid.places[role.rank], grid.places[peer]
            differ = [axis for axis, (one, other) in enumerate(zip(here, there, strict=True)) if one != other]
            if len(differ) == 1:
                lines.add(differ[0])
    return lines


def _cut(box: _Box, sizes: Sequence[int], lines: Collection[int]) -> list[_Box]:
    """Returns the parts of a box whose corners differ."""
    lengths = [end - first for first, end in box]
    staged = [axis for axis in lines if lengths[axis] > 1]
    axis = staged[0] if staged else lengths.index(max(lengths))
    first, end = box[axis]
    if staged:
        cuts = list(range(first, end + 1))
    elif first == 0 and end > 2:
        cuts = [first, first + 1, end]
    elif end == sizes[axis] and end - first > 2:
        cuts = [first, end - 1, end]
    else:
        cuts = [first, (first + end) // 2, end]
    return [(*box[:axis], part, *box[axis + 1 :]) for part in itertools.pairwise(cuts)]
