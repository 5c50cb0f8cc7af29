"""Removes the recorder's own effects on memory, so that the trace matches the unrecorded run.

A dispatch mode on the stack changes two things. Autograd treats every tensor as a subclass, and accumulates
gradients that meet at one tensor out of place instead of into the first. And a number among an operator's
arguments, wrapped as a tensor of a few bytes before the mode is called, is wrapped again below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.assemble.memory.block_lives import BlockLives
from memprof.trace.assemble.timeline import NEVER, Timeline
from memprof.trace.schema import NONE, Bools, Ints

#: Size of the largest number that can be wrapped: complex128.
_NUMBER_BYTES = 16


@dataclass(frozen=True)
class Mergers:
    """Lives that are one in the unrecorded run. Shape (mergers,) each.

    Attributes:
        op: Row of the operator.
        kept: Life of its first input, which also holds its result.
        dropped: Life of the result as recorded.
    """

    op: Ints
    kept: Ints
    dropped: Ints


def find_mergers(timeline: Timeline, lives: BlockLives, op: Ints, input_life: Ints, output_life: Ints) -> Mergers:
    """Finds in-place operators (in the unrecorded run) whose input was freed in favor of a separate result.

    Args:
        timeline: Rows and events.
        lives: Lives of blocks.
        op: Rows of the operators. Shape (candidates,), ascending.
        input_life: Life of each operator's first input; NONE without.
        output_life: Life of each operator's result; NONE without.
    """
    is_known = (input_life != NONE) & (output_life != NONE) & (input_life != output_life)
    op, kept, dropped = op[is_known], input_life[is_known], output_life[is_known]
    last = max(len(timeline.event_op) - 1, 0)
    dies = lives.died[kept] != NEVER
    is_replaced = dies & (timeline.event_op[np.minimum(lives.died[kept], last)] == op)
    is_own = (lives.born[dropped] != NONE) & (timeline.event_op[np.maximum(lives.born[dropped], 0)] == op)
    fits = is_replaced & is_own & (lives.size_bytes[kept] == lives.size_bytes[dropped])
    return Mergers(op[fits], kept[fits], dropped[fits])


def merge_lives(timeline: Timeline, lives: BlockLives, mergers: Mergers) -> tuple[BlockLives, Ints, Bools]:
    """Merges each pair into one life.

    Returns:
        The lives, with each kept one extended to the end of its result; the life each life has become, shape
        (lives,); and the events that the unrecorded run does not have, shape (events,).
    """
    become = np.arange(len(lives.born))
    died = lives.died.copy()
    is_void = np.zeros(len(timeline.event_bytes), dtype=np.bool_)
    for kept, dropped in zip(mergers.kept.tolist(), mergers.dropped.tolist(), strict=True):
        root = kept
        while become[root] != root:  # a sum of three gradients is merged twice
            root = int(become[root])
        become[dropped] = root
        is_void[lives.born[dropped]] = True
        is_void[lives.died[kept]] = True
        died[root] = lives.died[dropped]
    return BlockLives(lives.address, lives.size_bytes, lives.born, died), become, is_void


def wrapped_twice(timeline: Timeline, lives: BlockLives, op_start_ns: Ints) -> Bools:
    """Finds numbers that operators wrapped as tensors although they were already wrapped.

    Args:
        timeline: Rows and events.
        lives: Lives of blocks.
        op_start_ns: Start of each row's operator; any time for rows that are not operators. Shape (rows,).

    Returns:
        The lives that do not exist in the unrecorded run. Shape (lives,).
    """
    found = np.zeros(len(lives.born), dtype=np.bool_)
    small = np.flatnonzero((lives.size_bytes <= _NUMBER_BYTES) & (lives.born != NONE))
    born = lives.born[small]
    op = timeline.event_op[born]
    is_inside = timeline.event_is_inside[born] & (op != NONE)
    is_ahead = timeline.event_time_ns[born] < op_start_ns[np.maximum(op, 0)]
    ahead = is_inside & is_ahead
    died = lives.died[small]
    ends_inside = died != NEVER
    ended = died[ends_inside]
    ends_inside[ends_inside] = (timeline.event_op[ended] == op[ends_inside]) & timeline.event_is_inside[ended]
    again = is_inside & ~is_ahead & ends_inside
    keys = op * (_NUMBER_BYTES + 1) + lives.size_bytes[small]
    # For each size, as many were wrapped again as had been wrapped before.
    keys_ahead, counts = np.unique(keys[ahead], return_counts=True)
    if not len(keys_ahead) or not again.any():
        return found
    place = np.minimum(np.searchsorted(keys_ahead, keys[again]), len(keys_ahead) - 1)
    is_repeat = (keys_ahead[place] == keys[again]) & (_rank_within(keys[again]) < counts[place])
    found[small[again][is_repeat]] = True
    return found


def _rank_within(keys: Ints) -> Ints:
    """Returns the number of equal keys before each key."""
    order = np.argsort(keys, kind="stable")
    is_first = np.ones(len(keys), dtype=np.bool_)
    is_first[1:] = keys[order][1:] != keys[order][:-1]
    start = np.maximum.accumulate(np.where(is_first, np.arange(len(keys)), 0))
    rank = np.empty(len(keys), dtype=np.int64)
    rank[order] = np.arange(len(keys)) - start
    return rank
