"""Which operators use which memory, and which gradient sums run in place without the recorder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.assemble import texts
from memprof.trace.assemble.memory.artefacts import Mergers, find_mergers
from memprof.trace.assemble.memory.block_lives import BlockLives
from memprof.trace.assemble.recording import Recording
from memprof.trace.assemble.times import Partners
from memprof.trace.files.spool import BACKWARD, DRY_RUN, FLAG_GRAD_ENABLED, FLAG_RECOMPUTE, FLAG_VIEW, READ, WRITE
from memprof.trace.schema import NONE, Bools, Ints, Texts
from memprof.trace.zero_filling import FILLING, ZEROS

#: Autograd's gradient accumulation, where no timed step shows whether it runs in place.
_ACCUMULATION = "aten.add.Tensor"


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
    candidates = np.flatnonzero(in_backward & ~makes_graph & (names == _ACCUMULATION))
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
    filling = np.flatnonzero(np.isin(names, FILLING))
    filling = filling[filling > 0]
    filling = filling[np.isin(names[filling - 1], ZEROS)]
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
    life, op = touches.life[viewing][order], touches.raw_op[viewing][order]
    place = np.searchsorted(life, first)
    inside = np.minimum(place, max(len(life) - 1, 0))
    if not len(life):
        return np.zeros(len(raw_op), dtype=np.bool_)
    found: Bools = (first != NONE) & (life[inside] == first) & (op[inside] < raw_op)
    return found


def _first_life(touches: Touches, raw_ops: Ints, role: int) -> Ints:
    """Returns the life that each operator uses first in a role; NONE where there is none."""
    rows = np.flatnonzero(touches.role == role)
    ops, first = np.unique(touches.raw_op[rows], return_index=True)
    if not len(ops):
        return np.full(len(raw_ops), NONE, dtype=np.int64)
    place = np.minimum(np.searchsorted(ops, raw_ops), len(ops) - 1)
    return np.where(ops[place] == raw_ops, touches.life[rows[first[place]]], NONE)
