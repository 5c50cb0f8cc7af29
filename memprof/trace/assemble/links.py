"""Links backward operators to the forward operators they differentiate, and says what was saved between them."""

from __future__ import annotations

import numpy as np

from memprof.trace.schema import NONE, Ints, Ops, Saved, Storages, Uses

#: Raw node sequence of operators outside backward.
OUTSIDE = -1


def forward_of(sequence: Ints, node_sequence: Ints) -> Ints:
    """Returns the forward operator of each backward operator.

    Autograd numbers its nodes as it makes them, just before a forward operator runs; a backward node knows its
    number. So the operator of node k is the first that ran while the counter stood at k + 1.

    Args:
        sequence: Autograd's counter while each operator ran. Shape (ops,).
        node_sequence: Number of the backward node that ran each operator; negative outside. Shape (ops,).
    """
    numbers, first = np.unique(sequence, return_index=True)
    wanted = node_sequence + 1
    place = np.minimum(np.searchsorted(numbers, wanted), max(len(numbers) - 1, 0))
    link = np.full(len(sequence), NONE, dtype=np.int64)
    if len(numbers):
        found = (node_sequence >= 0) & (numbers[place] == wanted)
        link[found] = first[place[found]]
    link[link >= np.arange(len(link))] = NONE  # a node made before the recording began
    return link


def saved_for_backward(uses: Uses, storages: Storages, ops: Ops) -> Saved:
    """Says which storages were kept for backward, and by which forward operator.

    Derived, so that no hook need be installed in the job: a storage was saved by forward operator f when an
    operator of f's backward node reads it and it was there when f had run. A storage made in forward that is read
    when forward runs again inside backward was kept by the checkpoint: by the first operator that read it.

    Args:
        uses: Who touches what.
        storages: The storages.
        ops: The operators.
    """
    reads = uses.role != "write"
    use_op, use_storage = uses.op_id[reads], uses.storage_id[reads]
    forward_op, is_recompute, module_id = ops.forward_op_id, ops.is_recompute, ops.module_id
    is_backward = ops.phase == "backward"
    created_op = storages.created_op_id
    maker = forward_op[use_op]
    created = created_op[use_storage]
    by_node = (maker != NONE) & ~is_recompute[use_op] & (created <= maker)
    kept, makers, readers = use_storage[by_node], maker[by_node], use_op[by_node]

    is_repeat = is_recompute[use_op]
    if is_repeat.any():
        in_forward = ~is_backward[use_op]
        readers_order = np.argsort(use_op[in_forward], kind="stable")
        read_storage, first = np.unique(use_storage[in_forward][readers_order], return_index=True)
        first_reader = use_op[in_forward][readers_order][first]
        repeated = use_storage[is_repeat]
        if len(read_storage):
            place = np.minimum(np.searchsorted(read_storage, repeated), len(read_storage) - 1)
            was_read = read_storage[place] == repeated
            kept = np.concatenate([kept, repeated[was_read]])
            makers = np.concatenate([makers, first_reader[place[was_read]]])
            readers = np.concatenate([readers, use_op[is_repeat][was_read]])

    if not len(kept):
        return Saved.empty()
    order = np.lexsort((readers, kept, makers))
    kept, makers, readers = kept[order], makers[order], readers[order]
    is_last = np.ones(len(order), dtype=np.bool_)
    is_last[:-1] = (kept[1:] != kept[:-1]) | (makers[1:] != makers[:-1])
    kept, makers, readers = kept[is_last], makers[is_last], readers[is_last]
    return Saved.of(storage_id=kept, forward_op_id=makers, module_id=module_id[makers], released_op_id=readers)
