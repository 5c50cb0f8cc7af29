"""Decides which ranks of a dry run run at a time: as many as there are processors, those that others wait for first.

A rank that waits for a message of another takes no processor. It may be released by one that is no longer needed: ranks
that were only started to send messages are stopped once these are sent, and ended when all others have ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turns:
    """What ranks do until the next message or end.

    Attributes:
        going: Started ranks that run, or wait for a message; others are stopped.
        starting: Ranks to start.
        is_done: Whether no rank is needed any more.
        is_stuck: Whether all needed ranks wait for one another.
    """

    going: frozenset[int]
    starting: tuple[int, ...] = ()
    is_done: bool = False
    is_stuck: bool = False


def find_turns(
    alive: Collection[int],
    ended: Collection[int],
    waiting: Mapping[int, int],
    wanted: Sequence[int],
    most: int,
    world_size: int = 0,
) -> Turns:
    """Returns which ranks run next.

    Args:
        alive: Ranks that were started and have not ended.
        ended: Ranks that have ended.
        waiting: Ranks that wait for a message, each with the rank that sends it.
        wanted: Ranks to be dry-run, in order; they are known once rank 0 has ended.
        most: Maximum number of ranks that run at a time.
        world_size: Ranks of the job; those beyond are not started in advance.
    """
    needed: dict[int, None] = {}
    awaited: list[int] = []
    open_ranks = [0, *wanted]
    while open_ranks:
        rank = open_ranks.pop(0)
        if rank in needed or rank in ended:
            continue
        needed[rank] = None
        if rank in waiting:
            awaited.append(waiting[rank])
            open_ranks.append(waiting[rank])
    # Most will be wanted, the last one certainly.
    likely = sorted(alive, key=lambda rank: (rank != world_size - 1, rank))
    others = [] if 0 in ended else [*_next_in_line(waiting, world_size), *likely]
    order = dict.fromkeys((*awaited, *needed, *others))
    turns = [rank for rank in order if rank not in waiting and rank not in ended][:most]
    return Turns(
        going=frozenset(rank for rank in alive if rank in turns or rank in waiting),
        starting=tuple(rank for rank in turns if rank not in alive),
        is_done=not needed,
        is_stuck=bool(needed) and not turns,
    )


def _next_in_line(waiting: Mapping[int, int], world_size: int) -> list[int]:
    """Returns ranks that will be waited for next, where ranks wait for one another in a line, as stages do at first."""
    found = []
    for rank, awaited in waiting.items():
        step = awaited - rank
        if waiting.get(rank - step) == rank and 0 <= awaited + step < world_size:
            found.append(awaited + step)
    return found
