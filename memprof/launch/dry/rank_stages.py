"""Finds stages of a pipeline between two others that differ only in how many micro-batches they store.

Where stages run the same operators on the same sizes for a micro-batch, each moment of a rank's step holds a fixed
number of bytes and so many for each stored micro-batch. The peak, the highest of these moments, is then a convex
function of the number of stored micro-batches: between two ranks it is at most on the straight line, and it is exactly
on it where a third rank between them is.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

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
    """Returns the ranks whose survey is missing; None if the stages cannot be surveyed, and all must be run.

    Args:
        stages: A rank of each stage, in order.
        known: Roles of ranks that were dry-run.
        surveys: Surveys so far.
    """
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
    """Returns where a rank is between two others by its stored micro-batches, from 0 (as the first) to 1.

    Args:
        rank: The rank.
        first: The first of the others.
        other: The second.
        surveys: The surveys of all three.
    """
    start, end = surveys[first].stored, surveys[other].stored
    return (surveys[rank].stored - start) / (end - start) + 0.0 if end != start else 0.0  # no negative zero


def _is_ordered(numbers: Collection[int]) -> bool:
    pairs = list(itertools.pairwise(numbers))
    return all(one <= other for one, other in pairs) or all(one >= other for one, other in pairs)
