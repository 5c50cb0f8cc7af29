"""Assigns each storage a category, from recorded facts and from which operators create and read it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.files.spool import ACTIVATION, BUFFER, GRADIENT, HELD, INPUT, OPTIMIZER_STATE, PARAMETER
from memprof.trace.operator_facts import ALLOCATIONS, ZEROS, are_among
from memprof.trace.schema import NONE, Bools, Ints, Ops, Texts, Uses, is_beside

#: fully_shard's copies of a buffer into a unit's unsharded parameters, and of its gradients into one buffer.
_COPIES_OUT, _COPIES_IN = "fsdp.split_with_sizes_copy.default", "fsdp.chunk_cat.default"

#: Recorded purposes that determine a storage's category; the first match in this order applies.
SETTLED = (
    (PARAMETER, "parameter"),
    (BUFFER, "buffer"),
    (OPTIMIZER_STATE, "optimizer_state"),
    (GRADIENT, "gradient"),
)


@dataclass(frozen=True)
class Facts:
    """Facts that the recorder stated about storages. Shape (facts,) each.

    Attributes:
        storage: The storage; facts about memory outside the trace are dropped.
        category: Category code of ``trace.files.spool``.
        name: Raw number of the name; NONE without.
        module: Module that owns it; NONE without.
        tensor: Raw number of its shape and type.
        family: Number of its type and all sizes but the first; a data set and its batches share it.
    """

    storage: Ints
    category: Ints
    name: Ints
    module: Ints
    tensor: Ints
    family: Ints

    def about(self, code: int, storages: int) -> Bools:
        """Returns which storages have a fact with this category code."""
        mask = np.zeros(storages, dtype=np.bool_)
        mask[self.storage[self.category == code]] = True
        return mask


@dataclass(frozen=True)
class Lifetimes:
    """The properties of storages and their uses from which categories are derived.

    Attributes:
        created_op: Operator that created each storage; NONE when older. Shape (storages,).
        use_op: Operator of each use that reads or mutates. Shape (uses,).
        use_storage: Its storage.
        phase: Phase of each operator. Shape (ops,).
        is_recompute: Operators that repeat a forward operator.
        is_exchanged: Storages that ranks exchange: collective buffers and all-gathered parameters.
        is_scattered: Storages copied into such a buffer to be summed over ranks: unsharded gradients.
        outlives: Storages still alive at the end of the step after their own, and the latest of the same lines. What a
            step leaves in variables goes as the next one sets them.
    """

    created_op: Ints
    use_op: Ints
    use_storage: Ints
    phase: Texts
    is_recompute: Bools
    is_exchanged: Bools
    is_scattered: Bools
    outlives: Bools

    @classmethod
    def of(cls, created_op: Ints, freed_op: Ints, uses: Uses, ops: Ops) -> Lifetimes:
        """Collects the evidence from tables.

        An activation that is all-reduced in place stays an activation; collective buffers are empty at first.

        Args:
            created_op: Operator that created each storage; NONE when older. Shape (storages,).
            freed_op: Last operator before each was freed; NONE for those alive at the end.
            uses: Which operator uses which storage.
            ops: The operators.
        """
        touched = [np.zeros(len(created_op), dtype=np.bool_) for _ in range(3)]
        for mask, chosen in zip(
            touched, (ops.kind == "collective", ops.name == _COPIES_OUT, ops.name == _COPIES_IN), strict=True
        ):
            mask[uses.storage_id[chosen[uses.op_id]]] = True
        is_empty = are_among(ops.name, ALLOCATIONS | ZEROS) | (ops.kind == "collective")
        is_result = (uses.role == "write") & (uses.op_id == created_op[uses.storage_id]) & ~is_empty[uses.op_id]
        is_computed = np.zeros(len(created_op), dtype=np.bool_)
        is_computed[uses.storage_id[is_result]] = True
        is_tensor = np.zeros(len(created_op), dtype=np.bool_)
        is_tensor[uses.storage_id] = True  # others are workspaces, which libraries keep
        reading = uses.take(uses.role != "write")
        return cls(
            created_op=created_op,
            use_op=reading.op_id,
            use_storage=reading.storage_id,
            phase=ops.phase,
            is_recompute=ops.is_recompute,
            is_exchanged=(touched[0] & ~is_computed) | touched[1],
            is_scattered=touched[2] & is_computed,
            outlives=is_tensor & _outlives(created_op, freed_op, ops),
        )

    def used_by(self, is_wanted: Bools) -> Bools:
        """Returns which storages some operator of a kind uses."""
        mask = np.zeros(len(self.created_op), dtype=np.bool_)
        mask[self.use_storage[is_wanted[self.use_op]]] = True
        return mask

    def made_by(self, is_wanted: Bools) -> Bools:
        """Returns which storages an operator of a kind created."""
        known = self.created_op != NONE
        mask = np.zeros(len(self.created_op), dtype=np.bool_)
        mask[known] = is_wanted[self.created_op[known]]
        return mask


def _outlives(created_op: Ints, freed_op: Ints, ops: Ops) -> Bools:
    made = np.flatnonzero(created_op != NONE)
    created, freed = created_op[made], freed_op[made]
    gone = np.where(freed == NONE, int(ops.step.max(initial=0)) + 1, ops.step[freed])
    stays = gone > ops.step[created] + 1
    # Of the others, no line is needed. Text of fixed width would take more memory than all else about storages.
    is_wanted = (stays | (freed == NONE)) & (ops.stack_id[created] != NONE)
    codes = {name: code for code, name in enumerate(dict.fromkeys(ops.name.tolist()))}
    wanted = created[is_wanted]
    code = np.fromiter((codes[name] for name in ops.name[wanted].tolist()), dtype=np.int64, count=len(wanted))
    line = ops.stack_id[wanted] * len(codes) + code
    is_alike = np.zeros(len(made), dtype=np.bool_)
    is_alike[is_wanted] = np.isin(line, line[stays[is_wanted]])
    result = np.zeros(len(created_op), dtype=np.bool_)
    result[made] = stays | (is_alike & (freed == NONE))
    return result


def categorize(facts: Facts, lives: Lifetimes) -> Texts:
    """Returns the category of each storage. Shape (storages,).

    Parameters, buffers, optimizer state and gradients come from recorded facts. A storage created in forward and read
    in backward is an activation, and so is one created in forward or an evaluation that outlives its step. A model
    argument, or a storage created outside the training phases (or before) and
    read in them, is input; so is one Python held with the same type and sizes except the first. Other storages
    created by operators are temporary; other older ones are unknown.
    """
    storages = len(lives.created_op)
    phase = lives.phase
    is_forward = (phase == "forward") & ~lives.is_recompute
    is_backward = phase == "backward"
    is_other = is_beside(phase)
    is_older = lives.created_op == NONE
    made_in_forward = lives.made_by(is_forward)
    made_again = lives.made_by(lives.is_recompute)
    read_in_backward = lives.used_by(is_backward)
    read_by_nodes = lives.used_by(is_backward & ~lives.is_recompute)
    read_in_forward = lives.used_by(is_forward | is_other)
    stated_activation = facts.about(ACTIVATION, storages)

    category = np.full(storages, "temporary", dtype=np.object_)
    category[is_older] = "unknown"
    is_input = (is_older | lives.made_by(is_other)) & (read_in_forward | facts.about(INPUT, storages))
    is_input &= is_older | lives.used_by(is_forward) | facts.about(INPUT, storages)
    category[is_input] = "input"
    is_activation = (made_in_forward & read_in_backward) | (made_again & read_by_nodes)
    is_activation |= is_older & (stated_activation | (read_in_backward & ~is_input))
    is_activation |= lives.outlives & (made_in_forward | lives.made_by(phase == "evaluation")) & ~is_input
    category[is_activation] = "activation"
    category[lives.is_scattered & (category == "temporary")] = "gradient"
    category[lives.is_exchanged] = "collective"
    for code, text in reversed(SETTLED):
        category[facts.about(code, storages)] = text
    # The data set and prefetched, unused batches look like the batches that were used; copies of weights are neither.
    families = facts.family[np.isin(facts.storage, np.flatnonzero(category == "input"))]
    is_weight = np.isin(facts.tensor, facts.tensor[facts.category == PARAMETER])
    alike = facts.storage[(facts.category == HELD) & np.isin(facts.family, families) & ~is_weight]
    category[alike[category[alike] == "unknown"]] = "input"
    return category
