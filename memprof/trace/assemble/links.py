"""Links backward operators to the forward operators they differentiate, and derives what was saved between them."""

from __future__ import annotations

import numpy as np

from memprof.trace.assemble.timeline import first_rows
from memprof.trace.files.spool import OTHER_THREAD
from memprof.trace.operator_facts import CLONE, DETACH, NEW_EMPTY_STRIDED, SHAPE_READERS, are_among
from memprof.trace.schema import NONE, Bools, Ints, Ops, Saved, Storages, Texts, Uses

#: Raw node sequence number of operators outside backward.
OUTSIDE = -1


def forward_of(sequence: Ints, node_sequence: Ints, names: Texts, mutates: Bools) -> Ints:
    """Returns the forward operator of each backward operator.

    Autograd numbers its nodes as it creates them, just before a forward operator runs, and a backward node carries its
    number. So the operator of node k is the first that ran while the counter stood at k + 1. Two kinds of nodes, both
    for operators that change a tensor in place, are created differently:

    * An operator whose backward needs what it overwrites first clones it, and the clone creates its own node: it
      runs at k + 2. The clone stands for the operator, since the node's saved tensor exists from then on.
    * An operator that changes a view, run at k, also creates a node for the base, which runs the operator's own node.

    Args:
        sequence: Autograd's counter while each operator ran. Shape (ops,).
        node_sequence: Number of the backward node that ran each operator; negative outside. Shape (ops,).
        names: Name of each operator. Shape (ops,).
        mutates: Which operators change a tensor in place. Shape (ops,).
    """
    link = np.full(len(sequence), NONE, dtype=np.int64)
    if not len(sequence):
        return link
    numbers, first = np.unique(sequence, return_index=True)
    last = len(sequence) - 1 - np.unique(sequence[::-1], return_index=True)[1]

    def at(number: Ints, operators: Ints) -> Ints:
        place = np.minimum(np.searchsorted(numbers, number), len(numbers) - 1)
        return np.where((node_sequence >= 0) & (numbers[place] == number), operators[place], NONE)

    link = at(node_sequence + 1, first)
    # During a backward nested in a device's backward, nodes of both threads run.
    own = np.where(node_sequence >= OTHER_THREAD, node_sequence - OTHER_THREAD + 1, NONE)
    link = np.where((link == NONE) & (own != NONE), at(own, first), link)
    after_clone = at(node_sequence + 2, first)
    is_clone = (link == NONE) & (after_clone != NONE) & (names[after_clone] == CLONE)
    link = np.where(is_clone, after_clone, link)
    # The base's node begins by allocating the base's gradient.
    nodes, begins, node_of = np.unique(node_sequence, return_index=True, return_inverse=True)
    is_base = (nodes >= 0) & (names[begins] == NEW_EMPTY_STRIDED)
    changes = at(node_sequence, last)
    link = np.where(is_base[node_of] & (changes != NONE) & mutates[changes], changes, link)
    link[link >= np.arange(len(link))] = NONE  # the node was created before the recording began
    return link


def saved_for_backward(uses: Uses, storages: Storages, ops: Ops, is_inside: Bools) -> Saved:
    """Returns which storages were saved for backward, and by which forward operator.

    Derived, so that no hook is needed in the job: a storage was saved by forward operator f when an operator of
    f's backward node reads it and it existed after f ran. A forward storage that is read when forward runs again
    inside backward was kept by the checkpoint, and is attributed to the first operator that read it after its
    last change in place. What a node saves for its shape alone is freed with the node.

    Args:
        uses: Which operator uses which storage.
        storages: The storages.
        ops: The operators.
        is_inside: Operators that compiled code ran. Shape (ops,).
    """
    reads = uses.role != "write"
    use_op, use_storage = uses.op_id[reads], uses.storage_id[reads]
    forward_op, is_recompute, module_id = ops.forward_op_id, ops.is_recompute, ops.module_id
    is_backward = ops.phase == "backward"
    created_op = storages.created_op_id
    maker = forward_op[use_op]
    created = created_op[use_storage]
    if is_inside.any():
        maker = makers_in_regions(maker, created, use_op, use_storage, is_inside, is_backward)
    by_node = (maker != NONE) & ~is_recompute[use_op] & (created <= maker)
    # A node that runs forward again detaches what that forward saves: these reads are not of what the node saved.
    is_detached = ops.name[use_op] == DETACH
    by_node &= ~(is_detached & np.isin(maker, np.unique(forward_op[is_recompute])))
    kept, makers, readers = use_storage[by_node], maker[by_node], use_op[by_node]

    is_repeat = is_recompute[use_op]
    if is_repeat.any():
        in_forward = ~is_backward[use_op]
        # A region keeps what its input became: operators that read it before its last change in place are not its own.
        # Changes after the region has run again, such as the optimizer's, are none of its input.
        again = np.full(len(storages), len(ops), dtype=np.int64)
        np.minimum.at(again, use_storage[is_repeat], use_op[is_repeat])
        changed = np.full(len(storages), NONE, dtype=np.int64)
        is_change = in_forward & (uses.role[reads] == "mutate") & (use_op < again[use_storage])
        np.maximum.at(changed, use_storage[is_change], use_op[is_change])
        is_before = use_op <= changed[use_storage]
        readers_order = np.lexsort((use_op[in_forward], is_before[in_forward]))
        repeated, repeats = use_storage[is_repeat], use_op[is_repeat]
        row = first_rows(use_storage[in_forward][readers_order], repeated)
        firsts = np.append(use_op[in_forward][readers_order], NONE)[row]
        # In a pipeline, the first reader since the change may belong to a later micro-batch than the one run again.
        was_read = (row != NONE) & (firsts < repeats)
        kept = np.concatenate([kept, repeated[was_read]])
        makers = np.concatenate([makers, firsts[was_read]])
        readers = np.concatenate([readers, repeats[was_read]])

    by_shape = _saved_for_shape(uses, storages, ops)
    kept, makers, readers = (np.append(*both) for both in zip((kept, makers, readers), by_shape, strict=True))
    if not len(kept):
        return Saved.empty()
    order = np.lexsort((readers, kept, makers))
    kept, makers, readers = kept[order], makers[order], readers[order]
    is_last = np.ones(len(order), dtype=np.bool_)
    is_last[:-1] = (kept[1:] != kept[:-1]) | (makers[1:] != makers[:-1])
    kept, makers, readers = kept[is_last], makers[is_last], readers[is_last]
    return Saved.of(storage_id=kept, forward_op_id=makers, module_id=module_id[makers], released_op_id=readers)


def _saved_for_shape(uses: Uses, storages: Storages, ops: Ops) -> tuple[Ints, Ints, Ints]:
    """Returns what nodes saved and do not read: storages, forward operators, and operators after which they are freed.

    Such a storage is freed while its node runs, or later where something else holds it. That of a forward which a
    checkpoint runs again is freed earlier.
    """
    count = len(ops)
    first, last = np.full(count, count, dtype=np.int64), np.full(count, NONE, dtype=np.int64)
    nodes = np.flatnonzero((ops.forward_op_id != NONE) & ~ops.is_recompute)
    np.minimum.at(first, ops.forward_op_id[nodes], nodes)
    np.maximum.at(last, ops.forward_op_id[nodes], nodes)
    freed = storages.freed_op_id[uses.storage_id]
    is_saved = are_among(ops.name, SHAPE_READERS)[uses.op_id] & (uses.role == "read")
    is_saved &= (last[uses.op_id] != NONE) & ((freed == NONE) | (freed >= first[uses.op_id]))
    released = np.where(freed == NONE, last[uses.op_id], np.minimum(freed, last[uses.op_id]))
    return uses.storage_id[is_saved], uses.op_id[is_saved], released[is_saved]


def makers_in_regions(
    maker: Ints, created: Ints, use_op: Ints, use_storage: Ints, is_inside: Bools, is_backward: Bools
) -> Ints:
    """Returns the forward operator that saved what each use reads, now also of the uses by compiled regions.

    What an operator of the region created was saved by that operator; what is older, by the first that reads it.

    Args:
        maker: Forward operator of each use's node; the first operator of a region. Shape (uses,).
        created: Operator that created the storage, NONE when older.
        use_op: Operator of each use.
        use_storage: Its storage.
        is_inside: Operators that compiled code ran. Shape (ops,).
        is_backward: Operators of backward.
    """
    is_forward = is_inside & ~is_backward
    is_read = is_inside[use_op] & is_backward[use_op] & (maker != NONE) & is_forward[maker]
    if not is_read.any():
        return maker
    begins = np.unique(maker[is_read])
    last_begun = np.searchsorted(begins, np.arange(len(is_forward)), side="right") - 1
    region = np.where(is_forward & (last_begun >= 0), begins[last_begun], NONE)

    is_own = is_read & (created != NONE) & (region[created] == maker)
    count = int(use_storage.max()) + 1
    readers = np.flatnonzero(region[use_op] != NONE)
    readers = readers[np.argsort(use_op[readers], kind="stable")]
    row = first_rows(region[use_op[readers]] * count + use_storage[readers], maker * count + use_storage)
    is_older = is_read & ~is_own & (created <= maker) & (row != NONE)
    maker = np.where(is_older, np.append(use_op[readers], NONE)[row], maker)
    return np.where(is_own, created, maker)
