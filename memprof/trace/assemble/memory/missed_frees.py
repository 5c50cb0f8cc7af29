"""Ends lives whose free was missed: blocks that another thread freed.

A collective's own thread drops the last reference to a buffer that the training thread allocated. The allocator's count
shows the free, except where recording began when blocks were in use that it does not count.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from memprof.trace.assemble.memory.block_lives import BlockLives
from memprof.trace.assemble.timeline import NEVER, Timeline
from memprof.trace.schema import NONE, Bools, Ints

#: Limits of the search: at most this many lives in one sum, out of at most this many candidates.
_SUM_OF, _AMONG = 3, 24
#: Smaller blocks are left alone: their size does not identify them.
_LEAST_BYTES = 1024


def end_missed_frees(timeline: Timeline, lives: BlockLives, totals: Ints) -> BlockLives:
    """Ends lives where the allocator's count falls by their size without an event.

    Args:
        timeline: Rows and events.
        lives: Lives of blocks.
        totals: The allocator's count after each event. Shape (events,), at least one.
    """
    change = np.zeros(len(totals), dtype=np.int64)
    change[1:] = np.diff(totals) - timeline.event_bytes[1:]
    fallen = np.flatnonzero(change <= -_LEAST_BYTES)
    died = lives.died.copy()
    rows = np.flatnonzero(_lacks_free(timeline, lives) & (lives.size_bytes >= _LEAST_BYTES))
    if not len(fallen) or not len(rows):
        return lives
    for event in fallen.tolist():
        alive = rows[(lives.born[rows] < event) & (died[rows] >= event)]
        alive = alive[np.argsort(-lives.born[alive], kind="stable")][:_AMONG]
        found = _sum_to(lives.size_bytes[alive].tolist(), -int(change[event]))
        if found:
            died[alive[found]] = event
            rows = np.setdiff1d(rows, alive[found])
    return dataclasses.replace(lives, died=died)


def end_buffers_of_collectives(
    timeline: Timeline, lives: BlockLives, is_collective: Bools, touched: Ints
) -> BlockLives:
    """Ends buffers that a collective made for itself, and whose free was missed, within the collective.

    Args:
        timeline: Rows and events.
        lives: Lives of blocks.
        is_collective: The rows that are collectives. Shape (rows,).
        touched: Lives that hold a tensor of the collective that allocated them, and are therefore not such buffers.
    """
    died = lives.died.copy()
    is_candidate = _lacks_free(timeline, lives)
    is_candidate[touched] = False
    rows = np.flatnonzero(is_candidate)
    rows = rows[timeline.event_is_inside[lives.born[rows]] & is_collective[timeline.event_op[lives.born[rows]]]]
    for row in rows.tolist():
        born = int(lives.born[row])
        stop = int(np.searchsorted(timeline.event_op, timeline.event_op[born], side="right"))
        inside = born + np.flatnonzero(timeline.event_is_inside[born:stop])
        end = max(int(inside[-1]), born + 1)
        if end < len(timeline.event_bytes):
            died[row] = min(end, int(died[row]))
    return dataclasses.replace(lives, died=died)


def reused_ends(timeline: Timeline, lives: BlockLives) -> Ints:
    """Returns the bytes, negative, of lives that end at another block's event. Shape (events,)."""
    ended = np.zeros(len(timeline.event_bytes), dtype=np.int64)
    rows = np.flatnonzero(lives.died != NEVER)
    rows = rows[timeline.event_address[lives.died[rows]] != lives.address[rows]]
    np.subtract.at(ended, lives.died[rows], lives.size_bytes[rows])
    return ended


def _lacks_free(timeline: Timeline, lives: BlockLives) -> Bools:
    """Returns which lives that began in the recording never end, or end where their address was reused."""
    lacks: Bools = lives.died == NEVER
    ended = np.flatnonzero(~lacks)
    lacks[ended] = timeline.event_bytes[lives.died[ended]] > 0
    lacks &= lives.born != NONE
    return lacks


def _sum_to(sizes: list[int], amount: int) -> list[int]:
    """Returns the positions of the fewest sizes that sum to an amount; empty if none do."""
    for count in range(1, _SUM_OF + 1):
        for places in itertools.combinations(range(len(sizes)), count):
            if sum(sizes[place] for place in places) == amount:
                return list(places)
    return []
