"""Puts back the in-place operators that watching made functional.

With a dispatch mode on the stack autograd takes every tensor for a subclass: gradients that meet at one tensor are
then added into new memory, where it would else add them into the first. The plain run holds one buffer less at
that moment; so must the trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.assemble.lives import Lives
from memprof.trace.assemble.timeline import NEVER, Timeline
from memprof.trace.schema import NONE, Bools, Ints


@dataclass(frozen=True)
class Mergers:
    """Lives that are one in the plain run. Shape (mergers,) each.

    Attributes:
        op: Row of the operator.
        kept: Life of its first input, which takes its result.
        dropped: Life of the result as recorded.
    """

    op: Ints
    kept: Ints
    dropped: Ints


def find_mergers(timeline: Timeline, lives: Lives, op: Ints, input_life: Ints, output_life: Ints) -> Mergers:
    """Finds, among operators said to run in place, those whose input gave way to their result.

    Args:
        timeline: Rows and events.
        lives: Lives of blocks.
        op: Rows of the operators. Shape (candidates,), ascending.
        input_life: Life of the first input of each; NONE without.
        output_life: Life of the result of each; NONE without.
    """
    is_known = (input_life != NONE) & (output_life != NONE) & (input_life != output_life)
    op, kept, dropped = op[is_known], input_life[is_known], output_life[is_known]
    last = max(len(timeline.event_op) - 1, 0)
    dies = lives.died[kept] != NEVER
    gives_way = dies & (timeline.event_op[np.minimum(lives.died[kept], last)] == op)
    is_own = (lives.born[dropped] != NONE) & (timeline.event_op[np.maximum(lives.born[dropped], 0)] == op)
    fits = gives_way & is_own & (lives.size_bytes[kept] == lives.size_bytes[dropped])
    return Mergers(op[fits], kept[fits], dropped[fits])


def merge_lives(timeline: Timeline, lives: Lives, mergers: Mergers) -> tuple[Lives, Ints, Bools]:
    """Makes one life of each pair.

    Returns:
        The lives, where the kept one now lasts as long as the result did; the life each life has become, shape
        (lives,); and which events thereby never happened, shape (events,).
    """
    become = np.arange(len(lives.born))
    died = lives.died.copy()
    is_void = np.zeros(len(timeline.event_bytes), dtype=np.bool_)
    for kept, dropped in zip(mergers.kept.tolist(), mergers.dropped.tolist(), strict=True):
        root = kept
        while become[root] != root:  # a sum of three gradients merges twice
            root = int(become[root])
        become[dropped] = root
        is_void[lives.born[dropped]] = True
        is_void[lives.died[kept]] = True
        died[root] = lives.died[dropped]
    return Lives(lives.address, lives.size_bytes, lives.born, died), become, is_void
