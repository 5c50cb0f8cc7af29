"""Who comes last to the collectives of a job, and how long the others wait for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.analysis.ranks.rank_clocks import Alignment, align_clocks, match_collectives, needs_all
from memprof.trace.schema import RankCollectives, Ranks
from memprof.trace.store import Trace


@dataclass(frozen=True)
class Straggler:
    """One rank's arrivals at the collectives that it ran with others.

    Attributes:
        rank: Its number.
        collectives: Collectives it came to.
        times_last: How often it was the last to come.
        kept_waiting_us: How much later than the median rank it came, summed over those.
        waited_us: How long it was there before the last, summed over all.
    """

    rank: int
    collectives: int
    times_last: int
    kept_waiting_us: float
    waited_us: float


@dataclass(frozen=True)
class LateCollective:
    """One collective, and who came to it last.

    Attributes:
        step: Its step.
        place: Its place among the collectives of the step.
        name: Its operator.
        phase: Phase of the step.
        bytes: What it takes in one rank.
        last_rank: Who came last.
        spread_us: Time between the first and the last.
        behind_us: Time between the median rank and the last.
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
    """Who is waited for.

    Attributes:
        ranks: Each rank that met others, who keeps others waiting longest first.
        collectives: Each collective, latest first.
        alignment: How the clocks were aligned.
    """

    ranks: tuple[Straggler, ...]
    collectives: tuple[LateCollective, ...]
    alignment: Alignment

    def describe_clocks(self) -> str:
        """Says how the times of the ranks compare, in a sentence; "" on one clock."""
        if self.alignment.clocks < 2:
            return ""
        if not np.isfinite(self.alignment.worst_error_us):
            return (
                f"The ranks read {self.alignment.clocks} clocks and no collective bounds how far these lie apart: they "
                "are compared as they are."
            )
        return (
            f"The ranks read {self.alignment.clocks} clocks, aligned by their collectives to "
            f"{self.alignment.worst_error_us / 1e3:.2g} ms."
        )


def find_stragglers(trace: Trace) -> Stragglers:
    """Finds who comes last to the collectives of the recorded steps.

    A collective may be started early and waited for later, as the buckets of DDP are, so to come last to it need not
    cost the others all of that time.

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
        # Of an even number the earlier of the two in the middle: of two ranks, the one that waits.
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
