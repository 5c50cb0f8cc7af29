"""Which ranks arrive last at the collectives of a job, and how long the others wait for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.analysis.ranks.rank_clocks import Alignment, align_clocks, match_collectives, needs_all
from memprof.trace.schema import RankCollectives, Ranks
from memprof.trace.store import Trace


@dataclass(frozen=True)
class Straggler:
    """One rank's arrivals at the collectives it ran with others.

    Attributes:
        rank: Its number.
        collectives: Number of collectives it entered.
        times_last: How often it arrived last.
        kept_waiting_us: Its delay behind the median rank, summed over those.
        waited_us: Its wait for the last rank, summed over all.
    """

    rank: int
    collectives: int
    times_last: int
    kept_waiting_us: float
    waited_us: float


@dataclass(frozen=True)
class LateCollective:
    """One collective, and the rank that arrived last.

    Attributes:
        step: Its step.
        place: Its index among the collectives of the step.
        name: Its operator.
        phase: Phase of the step.
        bytes: Its bytes in one rank.
        last_rank: The rank that arrived last.
        spread_us: Time between the first and the last arrival.
        behind_us: Time between the median and the last arrival.
    """

    step: int
    place: int
    name: str
    phase: str
    bytes: int
    last_rank: int
    spread_us: float
    behind_us: float


@dataclass(frozen=True)
class Stragglers:
    """The stragglers of a job.

    Attributes:
        ranks: Each rank that met others, the one that keeps others waiting longest first.
        collectives: Each collective, the largest delay first.
        alignment: How the clocks were aligned.
    """

    ranks: tuple[Straggler, ...]
    collectives: tuple[LateCollective, ...]
    alignment: Alignment

    def describe_clocks(self) -> str:
        """Returns a sentence on how comparable the times of the ranks are; "" on one clock."""
        if self.alignment.clocks < 2:
            return ""
        if not np.isfinite(self.alignment.worst_error_us):
            return (
                f"The ranks read {self.alignment.clocks} clocks, and no collective bounds their offsets: times are "
                "compared unaligned."
            )
        return (
            f"The ranks read {self.alignment.clocks} clocks, aligned by their collectives to "
            f"{self.alignment.worst_error_us / 1e3:.2g} ms."
        )


def find_stragglers(trace: Trace) -> Stragglers:
    """Finds the ranks that arrive last at the collectives of the recorded steps.

    A collective may be started early and waited for later, such as the buckets of DDP, so a late arrival need not cost
    the others the full delay.

    Raises:
        BadInputError: A table is damaged.
    """
    matched = match_collectives(trace.summary(RankCollectives))
    alignment = align_clocks(trace.summary(Ranks), matched)
    counts: dict[int, list[float]] = {}
    late = []
    for group in matched:
        columns = np.flatnonzero(needs_all(group.names))
        offsets = np.array([alignment.offset_us[int(rank)] for rank in group.ranks])
        came = group.starts[:, columns] + offsets[:, None]
        # For an even number, the earlier of the two medians: of two ranks, the one that waits.
        last, median = came.max(axis=0), np.sort(came, axis=0)[(len(came) - 1) // 2]
        who = came.argmax(axis=0)
        for row, rank in enumerate(group.ranks.tolist()):
            is_last = (who == row) & (last > came.min(axis=0))
            found = counts.setdefault(rank, [0, 0, 0.0, 0.0])
            found[0] += len(columns)
            found[1] += int(is_last.sum())
            found[2] += float((last - median)[is_last].sum())
            found[3] += float((last - came[row]).sum())
        late += [
            LateCollective(
                step=int(group.steps[column]),
                place=int(group.places[column]),
                name=group.names[column],
                phase=group.phases[column],
                bytes=int(group.sizes[column]),
                last_rank=int(group.ranks[who[place]]),
                spread_us=float(last[place] - came[:, place].min()),
                behind_us=float(last[place] - median[place]),
            )
            for place, column in enumerate(columns.tolist())
        ]
    ranks = [Straggler(rank, int(one[0]), int(one[1]), one[2], one[3]) for rank, one in counts.items() if one[0]]
    return Stragglers(
        ranks=tuple(sorted(ranks, key=lambda one: (-one.kept_waiting_us, -one.times_last, one.rank))),
        collectives=tuple(sorted(late, key=lambda one: (-one.behind_us, -one.spread_us, one.step, one.place))),
        alignment=alignment,
    )
