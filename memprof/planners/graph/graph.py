"""The planners' view of a step: values that can be recomputed, their operators and readers, and a lower bound.

A *value* is one version of a storage. An operator that changes a storage in place makes its next version, a separate
value that reuses the memory of the previous one. Views are not values: an operator that reads a view reads its storage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.policies.rewrite.draft import find_spans
from memprof.replay.live import live_bytes
from memprof.replay.time import op_cost_us
from memprof.trace.schema import NONE, Bools, Floats, Ints
from memprof.trace.step import Step, sum_at

#: Storages of these categories outlive a step or are inputs: no operator of the step can recompute them.
_LASTING = ("parameter", "buffer", "gradient", "optimizer_state", "input")


@dataclass(frozen=True, eq=False)
class Graph:
    """A step as operators and values. Operator columns have shape ``(ops,)``, value columns ``(values,)``.

    Attributes:
        cost_us: Time that running an operator once more adds to the step, in microseconds.
        workspace_bytes: Its workspace while it runs.
        floor_bytes: Live bytes while it runs that no plan changes: everything but values and its workspace.
        floor_after_bytes: The same after the storages that die with it are freed.
        can_repeat: Whether it may run again: forward operators that write only values, and buffers, whose content the
            rerun leaves unchanged.
        is_backward: Whether it runs in backward.
        value_bytes: Size of a value's storage.
        value_op: The operator that makes it.
        value_freed_op: Last operator before its storage was freed in the recording; NONE where it outlives the step.
            For a value whose memory another reuses, the last operator before that.
        taken_from: The value whose memory it reuses in place; NONE for a value with its own allocation.
        storage_id: Its storage in the step.
        read_op: Operators that read values, in order, shape ``(reads,)``.
        read_value: The values they read, shape ``(reads,)``. An operator that changes a value in place reads it.
        duration_us: Duration of the recorded step.
    """

    cost_us: Floats
    workspace_bytes: Ints
    floor_bytes: Ints
    floor_after_bytes: Ints
    can_repeat: Bools
    is_backward: Bools
    value_bytes: Ints
    value_op: Ints
    value_freed_op: Ints
    taken_from: Ints
    storage_id: Ints
    read_op: Ints
    read_value: Ints
    duration_us: float

    @property
    def ops(self) -> int:
        """Number of operators."""
        return len(self.cost_us)

    @property
    def values(self) -> int:
        """Number of values."""
        return len(self.value_bytes)

    def reads_by_op(self) -> list[list[int]]:
        """Lists the values each operator reads."""
        reads: list[list[int]] = [[] for _ in range(self.ops)]
        for op_id, value in zip(self.read_op.tolist(), self.read_value.tolist(), strict=True):
            reads[op_id].append(value)
        return reads

    def values_by_op(self) -> list[list[int]]:
        """Lists the values each operator makes."""
        made: list[list[int]] = [[] for _ in range(self.ops)]
        for value, op_id in enumerate(self.value_op.tolist()):
            made[op_id].append(value)
        return made

    def last_forward_read(self) -> Ints:
        """Returns the last non-backward operator that reads each value before its first backward read.

        Returns:
            Operators, shape ``(values,)``; the value's own operator where no forward operator reads it.
        """
        last = self.value_op.copy()
        is_early = self.can_repeat[self.read_op]
        np.maximum.at(last, self.read_value[is_early], self.read_op[is_early])
        return last

    def is_saved(self) -> Bools:
        """Returns which values non-repeatable operators read after all repeatable ones: those saved for backward."""
        saved = np.zeros(self.values, dtype=np.bool_)
        saved[self.read_value[~self.can_repeat[self.read_op]]] = True
        return saved


def graph_of(step: Step) -> Graph:
    """Builds the graph of a step, recorded or transformed."""
    ops, storages, uses = step.ops, step.storages, step.uses
    created, category = storages.created_op_id, storages.category
    is_made = created != NONE
    is_lasting = np.isin(category, _LASTING)
    writes = uses.role != "read"

    # An operator may repeat if everything it writes was made in this step, or is a buffer.
    can_repeat = (ops.phase == "forward") & (ops.kind == "compute") & ~ops.is_recompute
    is_foreign = writes & (~is_made | is_lasting)[uses.storage_id] & (category[uses.storage_id] != "buffer")
    can_repeat[uses.op_id[is_foreign]] = False

    # What is older than the step and freed in forward is gone when backward would run its readers again.
    turns = np.append(np.flatnonzero(ops.phase == "backward"), len(ops))
    turn = turns[np.searchsorted(turns[:-1], uses.op_id)]
    freed = storages.freed_op_id[uses.storage_id]
    is_gone = ~is_made[uses.storage_id] & (freed != NONE) & (freed < turn)
    can_repeat[uses.op_id[is_gone & (storages.allocated_bytes[uses.storage_id] > 0)]] = False

    # A storage is a value if all its writers may repeat, and an operator may repeat only then: iterate to a fixed
    # point.
    is_value = is_made & ~is_lasting & (storages.allocated_bytes > 0)
    while True:
        fixed = np.zeros(len(storages), dtype=np.bool_)
        fixed[uses.storage_id[writes & ~can_repeat[uses.op_id]]] = True
        fixed[is_made] |= ~can_repeat[created[is_made]]
        stays = is_value & ~fixed
        blocked = writes & ~stays[uses.storage_id] & (category[uses.storage_id] != "buffer")
        blocked &= storages.allocated_bytes[uses.storage_id] > 0
        repeats = can_repeat.copy()
        repeats[uses.op_id[blocked]] = False
        if np.array_equal(repeats, can_repeat) and np.array_equal(stays, is_value):
            break
        can_repeat, is_value = repeats, stays

    live = live_bytes(step)
    chosen = storages.take(is_value)
    during, after = _held(chosen.created_op_id, chosen.freed_op_id, chosen.allocated_bytes, len(ops))
    version = _versions(step, is_value)
    return Graph(
        cost_us=op_cost_us(step),
        workspace_bytes=ops.workspace_bytes,
        floor_bytes=live.during - ops.workspace_bytes - during,
        floor_after_bytes=live.after - after,
        can_repeat=can_repeat,
        is_backward=np.asarray(ops.phase == "backward"),
        duration_us=step.duration_us,
        **version,
    )


def _held(created: Ints, freed: Ints, size: Ints, ops: int) -> tuple[Ints, Ints]:
    """Returns the bytes of some storages live during and after each operator."""
    gone = sum_at(freed, size, ops)
    after = np.cumsum(sum_at(created, size, ops) - gone)
    return after + gone, after


def _versions(step: Step, is_value: Bools) -> dict[str, Ints]:
    """Numbers the versions of storages, and binds every read to one."""
    storages, uses = step.storages, step.uses
    rows = np.flatnonzero(is_value[uses.storage_id])
    op_id, storage_id, role = uses.op_id[rows], uses.storage_id[rows], uses.role[rows]
    # The operator that makes a storage makes version 0, whatever its role.
    is_change = (role == "mutate") & (op_id > storages.created_op_id[storage_id])
    change_op, change_storage = op_id[is_change], storage_id[is_change]
    pair = np.unique(np.stack([change_storage, change_op]), axis=1)
    change_storage, change_op = pair[0], pair[1]

    values = np.flatnonzero(is_value)
    owner = np.concatenate([values, change_storage])
    maker = np.concatenate([storages.created_op_id[values], change_op])
    order = np.lexsort((maker, owner))
    owner, maker = owner[order], maker[order]
    is_first = np.append(True, owner[1:] != owner[:-1])[: len(owner)]
    is_last = np.append(owner[1:] != owner[:-1], True)[: len(owner)]
    taken_from = np.where(is_first, NONE, np.arange(len(owner)) - 1)
    freed = np.where(is_last, storages.freed_op_id[owner], np.append(maker[1:], 0)[: len(owner)] - 1)

    # A read is of the latest version made before it.
    is_read = (role == "read") | is_change
    read_op = op_id[is_read]
    found = find_spans(storage_id[is_read], read_op - 1, of=owner, first=maker, last=len(step.ops))
    is_known = found != NONE
    read = np.unique(np.stack([read_op[is_known], found[is_known]]), axis=1)
    return {
        "value_bytes": storages.allocated_bytes[owner],
        "value_op": maker,
        "value_freed_op": freed,
        "taken_from": taken_from,
        "storage_id": owner,
        "read_op": read[0],
        "read_value": read[1],
    }


def needed_bytes(graph: Graph) -> int:
    """Returns a lower bound on the peak of any schedule, however often operators run again.

    While an operator runs, its inputs, its outputs and the fixed memory are live. A value changed in place is counted
    once.
    """
    needed = graph.floor_bytes + graph.workspace_bytes
    np.add.at(needed, graph.value_op, np.where(graph.taken_from == NONE, graph.value_bytes, 0))
    np.add.at(needed, graph.read_op, graph.value_bytes[graph.read_value])
    return int(needed.max(initial=0))
