"""Operators that could write their result over an input, because nothing reads that input again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memprof.replay.static.intervals import Intervals
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step

#: Elementwise operators: each output element depends only on the same element of each input.
_NAMES = """
    abs add addcdiv addcmul bernoulli bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min
    clone cos div elu elu_backward eq erf exp exp2 expm1 fill floor ge gelu gelu_backward gt hardsigmoid hardswish
    hardswish_backward hardtanh hardtanh_backward le leaky_relu leaky_relu_backward lerp log log1p log2 logical_and
    logical_not logical_or lt masked_fill maximum minimum mish mul native_dropout_backward ne neg pow reciprocal relu
    rsqrt rsub sigmoid sigmoid_backward sign silu silu_backward sin softplus softplus_backward sqrt square sub tanh
    tanh_backward threshold threshold_backward where zeros_like
"""
POINTWISE = frozenset(_NAMES.split())


@dataclass(frozen=True, eq=False)
class Candidates:
    """Pairs of an output and the input whose memory it could reuse.

    Attributes:
        life: Index of the output among the lives, shape ``(pairs,)``.
        over: Index of the input it could overwrite.
        op_id: The operator.
    """

    life: Ints
    over: Ints
    op_id: Ints

    def __len__(self) -> int:
        """Returns the number of pairs."""
        return len(self.life)

    def take(self, rows: Ints | Bools) -> Candidates:
        """Returns some of the pairs."""
        return Candidates(self.life[rows], self.over[rows], self.op_id[rows])


def find_candidates(step: Step, lives: Intervals) -> Candidates:
    """Finds the outputs that could overwrite an input.

    The operator is elementwise and the last to touch the input, which was made in the step and is as large as the
    output. Each input is used once.

    Args:
        step: The step.
        lives: Its lives, as seen by the planner.
    """
    place = np.full(len(step.storages), NONE, dtype=np.int64)
    known = np.flatnonzero(lives.storage_id != NONE)
    place[lives.storage_id[known]] = known
    is_pointwise = np.array([operator_name(str(name)) in POINTWISE for name in step.ops.name], dtype=np.bool_)
    uses = step.uses
    is_relevant = is_pointwise[uses.op_id] & (place[uses.storage_id] != NONE)
    op_id, life = uses.op_id[is_relevant], place[uses.storage_id[is_relevant]]
    is_output = lives.first[life] == op_id
    is_output &= step.storages.created_op_id[lives.storage_id[life]] == op_id
    may_go = (lives.last[life] == op_id) & ~is_output & ~lives.is_fixed[life]
    may_go &= (step.storages.created_op_id[lives.storage_id[life]] != NONE) & (
        step.storages.freed_op_id[lives.storage_id[life]] != NONE
    )
    inputs: dict[int, list[int]] = {}
    for op, row in zip(op_id[may_go].tolist(), life[may_go].tolist(), strict=True):
        inputs.setdefault(op, []).append(row)
    pairs: list[tuple[int, int, int]] = []
    taken: set[int] = set()
    served: set[int] = set()
    for op, row in zip(op_id[is_output].tolist(), life[is_output].tolist(), strict=True):
        free = (one for one in inputs.get(op, []) if one not in taken and lives.size[one] == lives.size[row])
        over = NONE if row in served else next(free, NONE)
        if over != NONE:
            taken.add(over)
            served.add(row)
            pairs.append((row, over, op))
    columns = np.array(sorted(pairs, key=lambda pair: (pair[2], pair[0])), dtype=np.int64).reshape(-1, 3)
    return Candidates(columns[:, 0], columns[:, 1], columns[:, 2])


def in_place(lives: Intervals, chosen: Candidates) -> Intervals:
    """Merges each chosen output with the input it overwrites: one life, from the input's start to the output's end.

    Args:
        lives: The lives.
        chosen: Pairs; chains of them become one life.

    Returns:
        The remaining lives, in order.
    """
    root = np.arange(len(lives))
    first, last = lives.first.copy(), lives.last.copy()
    for life, over in zip(chosen.life.tolist(), chosen.over.tolist(), strict=True):  # in order of operators
        host = int(root[over])
        root[life] = host
        last[host] = max(last[host], last[life])
    kept = np.flatnonzero(root == np.arange(len(lives)))
    return replace(lives, first=first, last=last).take(kept)


def operator_name(name: str) -> str:
    """Returns an operator's bare name: ``aten.add.Tensor`` is ``add``."""
    parts = name.removeprefix("aten::").split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else parts[0]
