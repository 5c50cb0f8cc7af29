"""Aligns the clocks of a job's machines by its collectives.

Processes on one running system share a clock. Between machines, clocks differ by the error of the network's time
service. A collective that needs every rank ends nowhere before all ranks have entered it, so each one bounds the offset
between two clocks from both sides. The estimate is the middle of the interval all of them leave, and its error is half
the width.

Source: the clock condition of L. Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System" (1978),
with collectives as the messages; taking the middle is D. Mills' choice for one exchange, "Internet Time
Synchronization" (1991).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from memprof.trace.files.coded import Coded
from memprof.trace.schema import Bools, Floats, Ints, RankCollectives, Ranks

#: Name parts of collectives that end nowhere before every rank has entered them. Excluded are broadcasts, reductions to
#: one rank, scatters and gathers: their root may finish before others start.
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
    """What to add to a rank's times to convert them to the lowest rank's clock.

    Attributes:
        offset_us: Offset to add, by rank.
        error_us: Maximum error of the offset, by rank: 0 on the same clock, infinite where nothing bounds it.
        clocks: Number of distinct clocks.
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
        names: Name of each collective, one per column, by step and place.
        steps: Step of each.
        places: Index of each in its step.
        phases: Phase of each.
        sizes: Bytes of each in one rank.
        starts: When each rank entered it, by its own clock; NaN where it did not. Shape (ranks, collectives).
        overs: When it had certainly ended, likewise.
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
    """Matches the collectives of ranks that ran the same ones, of the same sizes, in the same order in a step.

    A recording does not contain the process group of a collective. Ranks with other collectives in a step, such as the
    stages of a pipeline, are matched among themselves.

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
        _matrix(collectives, np.stack(rows))
        for (_, _), rows in sorted(groups.items(), key=itemgetter(0))
        if len(rows) > 1
    )


def align_clocks(ranks: Ranks, matched: tuple[Matched, ...]) -> Alignment:
    """Estimates the clock offsets between a job's machines."""
    numbers = ranks.rank.tolist()
    # A rank with an unknown clock counts as having its own.
    clock_of = {rank: clock or f"of rank {rank}" for rank, clock in zip(numbers, ranks.clock.tolist(), strict=True)}
    clocks = list(dict.fromkeys(clock_of[rank] for rank in sorted(numbers)))
    offsets, errors = {clocks[0]: 0.0} if clocks else {}, {clocks[0]: 0.0} if clocks else {}
    if len(clocks) > 1:
        low, high = _bounds(clocks, clock_of, matched)
        for place, clock in enumerate(clocks[1:], start=1):
            known = math.isfinite(low[place]) and math.isfinite(high[place])
            offsets[clock] = float(low[place] + high[place]) / 2 if known else 0.0
            # Crossing bounds mean that the clocks drift: the gap between them is the uncertainty.
            errors[clock] = abs(float(high[place] - low[place])) / 2 if known else math.inf
    return Alignment(
        offset_us={rank: offsets[clock_of[rank]] for rank in numbers},
        error_us={rank: errors[clock_of[rank]] for rank in numbers},
        clocks=len(clocks),
    )


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
    """Returns the smallest and largest possible offset of each clock; infinite where nothing bounds it.

    A collective ends on the first clock after another clock's ranks have entered it, and vice versa.
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
    """Returns which collectives end nowhere before every rank has entered them."""
    return np.array([any(part in name for part in _NEED_ALL) for name in names], dtype=np.bool_)


def _reduced(reduce: np.ufunc | object, values: Floats) -> Floats:
    """Reduces over ranks; NaN where a rank has no value."""
    result: Floats = reduce(values, axis=0)  # type: ignore[operator]
    return result


def _least(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.min()) if len(known) else math.inf
