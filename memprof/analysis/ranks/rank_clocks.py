"""Aligns the clocks of a job's machines by what its collectives prove.

Processes of one running system read one clock. Between machines, clocks differ by what the network's time service
leaves. A collective that needs every rank is over nowhere before all have come to it, so each one bounds how far two
clocks may lie apart, from both sides; the estimate is the middle of what all of them together leave open, and its error
is half of that.

Source: the clock condition of L. Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System" (1978),
with collectives as the messages; taking the middle is D. Mills' choice for one exchange, "Internet Time
Synchronization" (1991).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from memprof.trace.files.columns import Coded
from memprof.trace.schema import Bools, Floats, Ints, RankCollectives, Ranks

#: Parts of the names of collectives that are over nowhere before every rank has come to them. Not so broadcasts,
#: reductions to one rank, scatters and gathers: their root may be done before others begin.
_NEED_ALL = (
    "allreduce",
    "all_reduce",
    "allgather",
    "all_gather",
    "reduce_scatter",
    "alltoall",
    "all_to_all",
    "barrier",
)


@dataclass(frozen=True)
class Alignment:
    """What to add to a rank's times so that they compare with those of the lowest rank's clock.

    Attributes:
        offset_us: To add, by rank.
        error_us: How far that may be off, by rank: 0 on the same clock, infinite where nothing tells.
        clocks: How many clocks the ranks read.
    """

    offset_us: dict[int, float]
    error_us: dict[int, float]
    clocks: int

    @property
    def worst_error_us(self) -> float:
        """The largest error of any rank."""
        return max(self.error_us.values(), default=0.0)


@dataclass(frozen=True, eq=False)
class Matched:
    """Collectives that several ranks ran together, as a matrix of ranks and collectives.

    Attributes:
        ranks: The ranks, one a row; lowest first.
        names: Name of each collective, one a column, by step and place.
        steps: Its step.
        places: Its place in the step.
        phases: Phase of the step it ran in.
        sizes: Bytes it takes in one rank.
        starts: When each rank came to it, by its own clock; NaN where it did not. Shape (ranks, collectives).
        overs: When it was over for certain, likewise.
    """

    ranks: Ints
    names: tuple[str, ...]
    steps: Ints
    places: Ints
    phases: tuple[str, ...]
    sizes: Ints
    starts: Floats
    overs: Floats


def match_collectives(collectives: RankCollectives) -> tuple[Matched, ...]:
    """Puts together the collectives of ranks that ran the same ones, of the same sizes, in the same order of a step.

    A recording does not tell which ranks a collective joins. Those with other collectives in a step, as the stages of
    a pipeline, are matched among themselves.

    Args:
        collectives: The collectives of all ranks.

    Returns:
        One for each group of ranks and step, by step.
    """
    names = Coded.of(collectives.name)
    order = np.lexsort((collectives.place, collectives.rank, collectives.step))
    step, rank = collectives.step[order], collectives.rank[order]
    is_first = np.append(True, (step[1:] != step[:-1]) | (rank[1:] != rank[:-1]))[: len(order)]
    edges = np.append(np.flatnonzero(is_first), len(order))
    groups: dict[tuple[int, bytes], list[Ints]] = {}
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        rows = order[low:high]
        what = np.stack([names.codes[rows].astype(np.int64), collectives.read_bytes[rows]]).tobytes()
        groups.setdefault((int(step[low]), what), []).append(rows)
    return tuple(
        _matrix(collectives, np.stack(rows)) for (_, _), rows in sorted(groups.items(), key=_by_step) if len(rows) > 1
    )


def align_clocks(ranks: Ranks, matched: tuple[Matched, ...]) -> Alignment:
    """Estimates how far the clocks of a job's machines lie apart.

    Args:
        ranks: The ranks and the clocks that they read.
        matched: The collectives they ran together.
    """
    numbers = ranks.rank.tolist()
    # A rank that does not tell its clock has one of its own.
    clock_of = {rank: clock or f"of rank {rank}" for rank, clock in zip(numbers, ranks.clock.tolist(), strict=True)}
    clocks = list(dict.fromkeys(clock_of[rank] for rank in sorted(numbers)))
    offsets, errors = {clocks[0]: 0.0} if clocks else {}, {clocks[0]: 0.0} if clocks else {}
    if len(clocks) > 1:
        low, high = _bounds(clocks, clock_of, matched)
        for place, clock in enumerate(clocks[1:], start=1):
            known = math.isfinite(low[place]) and math.isfinite(high[place])
            offsets[clock] = float(low[place] + high[place]) / 2 if known else 0.0
            # Bounds that cross tell of clocks that drift: what they are apart is as uncertain as what lies between.
            errors[clock] = abs(float(high[place] - low[place])) / 2 if known else math.inf
    return Alignment(
        offset_us={rank: offsets[clock_of[rank]] for rank in numbers},
        error_us={rank: errors[clock_of[rank]] for rank in numbers},
        clocks=len(clocks),
    )


def _by_step(group: tuple[tuple[int, bytes], list[Ints]]) -> tuple[int, bytes]:
    return group[0]


def _matrix(collectives: RankCollectives, rows: Ints) -> Matched:
    first = rows[0]
    return Matched(
        ranks=collectives.rank[rows[:, 0]],
        names=tuple(collectives.name[first].tolist()),
        steps=collectives.step[first],
        places=collectives.place[first],
        phases=tuple(collectives.phase[first].tolist()),
        sizes=collectives.read_bytes[first],
        starts=collectives.start_us[rows],
        overs=collectives.over_us[rows],
    )


def _bounds(clocks: list[str], clock_of: dict[int, str], matched: tuple[Matched, ...]) -> tuple[Floats, Floats]:
    """Returns the least and the most that may be added to each clock's times; infinite where nothing bounds it.

    What is over on the first clock is over after another clock's ranks have come to it, and the other way round.
    """
    low, high = np.full(len(clocks), -np.inf), np.full(len(clocks), np.inf)
    place_of = {clock: place for place, clock in enumerate(clocks)}
    for group in matched:
        columns = np.flatnonzero(needs_all(group.names))
        of_rank = np.array([place_of[clock_of[int(rank)]] for rank in group.ranks])
        mine = of_rank == 0
        if not len(columns) or not mine.any():
            continue
        starts, overs = group.starts[:, columns], group.overs[:, columns]
        my_start = _reduced(np.max, starts[mine])
        my_over = _reduced(np.min, overs[mine])
        for place in sorted(set(of_rank.tolist()) - {0}):
            theirs = of_rank == place
            high[place] = min(high[place], _least(my_over - _reduced(np.max, starts[theirs])))
            low[place] = max(low[place], -_least(_reduced(np.min, overs[theirs]) - my_start))
    return low, high


def needs_all(names: tuple[str, ...]) -> Bools:
    """Tells which collectives are over nowhere before every rank has come to them."""
    return np.array([any(part in name for part in _NEED_ALL) for name in names], dtype=np.bool_)


def _reduced(reduce: np.ufunc | object, values: Floats) -> Floats:
    """Reduces over ranks; NaN where a rank does not tell."""
    result: Floats = reduce(values, axis=0)  # type: ignore[operator]
    return result


def _least(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.min()) if len(known) else math.inf
