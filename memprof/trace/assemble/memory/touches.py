"""Which operators use which memory, without the recorder's own effects on it.

A dispatch mode on the stack changes two things. Autograd treats every tensor as a subclass, and accumulates
gradients that meet at one tensor out of place instead of into the first. And a number among an operator's
arguments, wrapped as a tensor of a few bytes before the mode is called, is wrapped again below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.assemble import texts
from memprof.trace.assemble.memory.block_lives import BlockLives
from memprof.trace.assemble.recording import Recording
from memprof.trace.assemble.timeline import NEVER, Timeline, first_rows
from memprof.trace.assemble.times import Partners
from memprof.trace.files.spool import BACKWARD, DRY_RUN, FLAG_GRAD_ENABLED, FLAG_RECOMPUTE, FLAG_VIEW, READ, WRITE
from memprof.trace.operator_facts import FILLS_ZEROS, GRADIENT_SUM, ZEROS, are_among
from memprof.trace.schema import NONE, Bools, Ints, Texts

#: Size of the largest number that can be wrapped: complex128.
_NUMBER_BYTES = 16


@dataclass(frozen=True)
class Touches:
    """Operators and the memory they use. Shape (touches,) each."""

    raw_op: Ints
    address: Ints
    size_bytes: Ints
    role: Ints
    tensor: Ints
    life: Ints


def find_touches(recording: Recording, lives: BlockLives) -> Touches:
    """Returns the uses of memory by the recorded operators, and the life that each one touches."""
    columns = recording.spool.columns("touches")
    op = columns["op"] - recording.epoch.first_op
    is_inside = (op >= 0) & (op < recording.raw_count) & (columns["address"] != 0)
    op = op[is_inside]
    address, role = columns["address"][is_inside], columns["role"][is_inside]
    moment = np.where(role == WRITE, recording.raw["end_ns"][op], recording.raw["start_ns"][op])
    life = lives.find(address, recording.timeline.position(moment))
    return Touches(op, address, columns["size_bytes"][is_inside], role, columns["tensor"][is_inside], life)


def in_place_sums(recording: Recording, lives: BlockLives, touches: Touches, partners: dict[int, Partners]) -> Mergers:
    """Finds operators that run in place in the unrecorded run, per the timed step or else autograd's own rules."""
    raw = recording.raw
    names = texts.look_up(recording.names, raw["name"])
    in_backward = (raw["phase"] == BACKWARD) & ((raw["flags"] & FLAG_RECOMPUTE) == 0)
    makes_graph = (raw["flags"] & FLAG_GRAD_ENABLED) != 0  # `create_graph`: the terms of a sum stay as they are
    candidates = np.flatnonzero(in_backward & ~makes_graph & (names == GRADIENT_SUM))
    runs_in_place = np.zeros(recording.raw_count, dtype=np.bool_)
    runs_in_place[candidates] = _is_sum_of_gradients(recording, lives, touches, candidates)
    runs_in_place |= in_backward & _fills_zeros(touches, names)
    if recording.epoch.source == DRY_RUN:
        runs_in_place[candidates] &= ~_was_viewed(recording, touches, candidates)
    for step, found in partners.items():
        inside = np.flatnonzero(recording.raw_step == step)
        is_known = ~np.isnan(found.duration_us)
        runs_in_place[inside[is_known]] = found.runs_in_place[is_known]
    candidates = np.flatnonzero(runs_in_place)
    input_life = _first_life(touches, candidates, READ)
    output_life = _first_life(touches, candidates, WRITE)
    return find_mergers(recording.timeline, lives, recording.row_of_raw[candidates], input_life, output_life)


def _is_sum_of_gradients(recording: Recording, lives: BlockLives, touches: Touches, raw_op: Ints) -> Bools:
    """Distinguishes the engine's gradient sums from sums within a backward formula.

    In an engine sum, the first term was created under another node, and the result is used under another node.
    """
    node = recording.raw["node_sequence"]
    first = _first_life(touches, raw_op, READ)
    is_known = first != NONE
    is_known[is_known] = lives.born[first[is_known]] != NONE
    row = recording.timeline.event_op[lives.born[first[is_known]]]
    maker = np.full(len(raw_op), NONE, dtype=np.int64)
    maker[is_known] = np.where(row >= 0, recording.timeline.raw_op[np.maximum(row, 0)], NONE)
    is_sum: Bools = (maker != NONE) & (node[np.maximum(maker, 0)] != node[raw_op])
    result = _first_life(touches, raw_op, WRITE)
    order = np.lexsort((touches.raw_op, touches.life))
    lives_sorted, ops_sorted = touches.life[order], touches.raw_op[order]
    for i in np.flatnonzero(is_sum & (result != NONE)).tolist():
        begin, end = np.searchsorted(lives_sorted, [result[i], result[i] + 1])
        later = ops_sorted[begin:end]
        later = later[later > raw_op[i]]
        is_sum[i] = not len(later) or node[later[0]] != node[raw_op[i]]
    return is_sum


def _fills_zeros(touches: Touches, names: Texts) -> Bools:
    """Returns which operators fill the zeros that the operator before them made. Shape (ops,)."""
    found = np.zeros(len(names), dtype=np.bool_)
    filling = np.flatnonzero(are_among(names, FILLS_ZEROS))
    filling = filling[filling > 0]
    filling = filling[are_among(names[filling - 1], ZEROS)]
    made = _first_life(touches, filling - 1, WRITE)
    found[filling] = (made != NONE) & (made == _first_life(touches, filling, READ))
    return found


def _was_viewed(recording: Recording, touches: Touches, raw_op: Ints) -> Bools:
    """Returns where a view of a sum's first term exists: autograd then keeps that term and adds out of place.

    A dry run has no timed step to show this.
    """
    first = _first_life(touches, raw_op, READ)
    is_view = (recording.raw["flags"][touches.raw_op] & FLAG_VIEW) != 0
    viewing = np.flatnonzero(is_view & (touches.role == READ) & (touches.life != NONE))
    order = np.lexsort((touches.raw_op[viewing], touches.life[viewing]))
    row = first_rows(touches.life[viewing][order], first)
    found: Bools = (row != NONE) & (np.append(touches.raw_op[viewing][order], NONE)[row] < raw_op)
    return found


def _first_life(touches: Touches, raw_ops: Ints, role: int) -> Ints:
    """Returns the life that each operator uses first in a role; NONE where there is none."""
    rows = np.flatnonzero(touches.role == role)
    return np.append(touches.life[rows], NONE)[first_rows(touches.raw_op[rows], raw_ops)]


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
