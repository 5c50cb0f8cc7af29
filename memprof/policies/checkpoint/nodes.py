"""When each node of autograd's graph runs in backward: the operators that belong to one forward operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step

#: Sums gradients where several paths meet. The engine runs it after releasing the node's saved tensors.
_ACCUMULATION = ("aten.add.Tensor", "aten.add_.Tensor")

#: Reduces a gradient to a broadcast operand's size or type. The engine runs it after the node's own function has
#: returned and its locals are freed, and before it releases the node's saved tensors.
_REDUCTION = ("aten.sum.dim_IntList", "aten._to_copy.default")
_RESHAPE = ("aten.view.default", "aten._unsafe_view.default")


@dataclass(frozen=True, eq=False)
class Nodes:
    """Moments of the node of each forward operator, NONE where none ran; shape ``(ops,)``.

    Attributes:
        first: Its first operator: its saved tensors are unpacked right before it.
        returned: The last operator its function runs: unpacked tensors without other references are freed after it.
        released: The last operator before its saved tensors are released.
        last: Its last operator, sums of gradients included.
    """

    first: Ints
    returned: Ints
    released: Ints
    last: Ints


def find_nodes(step: Step) -> Nodes:
    """Finds the nodes' moments from the operators that ran in backward."""
    ops = step.ops
    rows = np.flatnonzero(ops.forward_op_id != NONE)
    owner = ops.forward_op_id[rows]
    first = np.full(len(ops), NONE, dtype=np.int64)
    last = first.copy()
    first[owner[::-1]] = rows[::-1]
    last[owner] = rows

    nodes = np.unique(owner)
    known = {name: number for number, name in enumerate((*_ACCUMULATION, *_REDUCTION, *_RESHAPE))}
    kind = np.array([known.get(name, NONE) for name in ops.name], dtype=np.int64)
    is_sum = (kind >= 0) & (kind < len(_ACCUMULATION))
    is_reduction = (kind >= len(_ACCUMULATION)) & (kind < len(_ACCUMULATION) + len(_REDUCTION))
    is_reshape = kind >= len(_ACCUMULATION) + len(_REDUCTION)
    begin, end = first[nodes], last[nodes].copy()
    while True:
        step_back = is_sum[end] & (end > begin)
        if not step_back.any():
            break
        end -= step_back
    released = last.copy()
    released[nodes] = end
    end = end.copy()
    while True:
        pair = is_reshape[end] & (end - 1 > begin) & is_reduction[np.maximum(end - 1, 0)]
        single = is_reduction[end] & (end > begin)
        if not (pair | single).any():
            break
        end -= 2 * pair + (single & ~pair)
    returned = last.copy()
    returned[nodes] = end
    return Nodes(first, returned, released, last)
