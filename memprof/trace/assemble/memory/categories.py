"""Decides what each storage is for, from what was stated about it and from who made and who reads it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.files.spool import ACTIVATION, BUFFER, GRADIENT, HELD, INPUT, OPTIMIZER_STATE, PARAMETER
from memprof.trace.schema import NONE, Bools, Ints, Ops, Texts, Uses, is_beside

#: fully_shard's copies of a buffer into a unit's whole parameters, and of its gradients into one.
_COPIES_OUT, _COPIES_IN = "fsdp.split_with_sizes_copy.default", "fsdp.chunk_cat.default"
#: Operators that take memory and compute nothing.
_EMPTY = ("aten.empty", "aten.new_empty", "aten.zeros", "aten.new_zeros")

#: Stated purposes that settle a storage's category, the first one found in this order.
_SETTLED = (
    (PARAMETER, "parameter"),
    (BUFFER, "buffer"),
    (OPTIMIZER_STATE, "optimizer_state"),
    (GRADIENT, "gradient"),
)


@dataclass(frozen=True)
class Facts:
    """What the recorder stated about storages. Shape (facts,) each.

    Attributes:
        storage: The storage; facts about memory that is not in the trace are left out.
        category: Category code of trace.spool.
        name: Raw number of the name, NONE without.
        module: Module that owns it, NONE without.
        tensor: Raw number of its shape and type.
        family: Number of its type and of all sizes but the first: a data set and its batches have the same.
    """

    storage: Ints
    category: Ints
    name: Ints
    module: Ints
    tensor: Ints
    family: Ints

    def about(self, code: int, storages: int) -> Bools:
        """Returns which storages a fact with this category code is about."""
        mask = np.zeros(storages, dtype=np.bool_)
        mask[self.storage[self.category == code]] = True
        return mask


@dataclass(frozen=True)
class Lifetimes:
    """What the categories need to know of storages and their uses.

    Attributes:
        created_op: Operator that made each storage; NONE when older. Shape (storages,).
        use_op: Operator of each use that reads or changes. Shape (uses,).
        use_storage: Its storage.
        phase: Phase of each operator. Shape (ops,).
        is_recompute: Operators that repeat forward.
        is_exchanged: Storages that ranks exchange: buffers of collectives, and parameters gathered whole.
        is_scattered: Storages that are copied into such a buffer to be summed over ranks: whole gradients.
    """

    created_op: Ints
    use_op: Ints
    use_storage: Ints
    phase: Texts
    is_recompute: Bools
    is_exchanged: Bools
    is_scattered: Bools

    @classmethod
    def of(cls, created_op: Ints, uses: Uses, ops: Ops) -> Lifetimes:
        """Collects them from tables.

        An activation that is summed over ranks in place stays one: the buffers of collectives are empty at first.

        Args:
            created_op: Operator that made each storage; NONE when older. Shape (storages,).
            uses: Who touches them.
            ops: The operators.
        """
        names = ops.name.astype(str)
        touched = [np.zeros(len(created_op), dtype=np.bool_) for _ in range(3)]
        for mask, chosen in zip(
            touched, (ops.kind == "collective", names == _COPIES_OUT, names == _COPIES_IN), strict=True
        ):
            mask[uses.storage_id[chosen[uses.op_id]]] = True
        is_empty = np.array([name.startswith(_EMPTY) for name in names], dtype=np.bool_) | (ops.kind == "collective")
        is_result = (uses.role == "write") & (uses.op_id == created_op[uses.storage_id]) & ~is_empty[uses.op_id]
        is_computed = np.zeros(len(created_op), dtype=np.bool_)
        is_computed[uses.storage_id[is_result]] = True
        reading = uses.take(uses.role != "write")
        return cls(
            created_op=created_op,
            use_op=reading.op_id,
            use_storage=reading.storage_id,
            phase=ops.phase,
            is_recompute=ops.is_recompute,
            is_exchanged=(touched[0] & ~is_computed) | touched[1],
            is_scattered=touched[2] & is_computed,
        )

    def used_by(self, is_wanted: Bools) -> Bools:
        """Returns which storages some operator of a kind touches."""
        mask = np.zeros(len(self.created_op), dtype=np.bool_)
        mask[self.use_storage[is_wanted[self.use_op]]] = True
        return mask

    def made_by(self, is_wanted: Bools) -> Bools:
        """Returns which storages an operator of a kind made."""
        known = self.created_op != NONE
        mask = np.zeros(len(self.created_op), dtype=np.bool_)
        mask[known] = is_wanted[self.created_op[known]]
        return mask


def categorize(facts: Facts, lives: Lifetimes) -> Texts:
    """Returns the category of each storage. Shape (storages,).

    Parameters, buffers, optimizer state and gradients are stated. What is made in forward and read in backward is
    an activation. What a model is called with, or what is made outside the training phases (or before) and read
    there, is input; so is what Python held of the same type and sizes but for the first. The rest of what operators
    made is temporary; the rest of what is older is unknown.
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
    category[is_activation] = "activation"
    category[lives.is_scattered & (category == "temporary")] = "gradient"
    category[lives.is_exchanged] = "collective"
    for code, text in reversed(_SETTLED):
        category[facts.about(code, storages)] = text
    # The data set, and batches made ahead and not used yet, look like the batches that were used.
    families = facts.family[np.isin(facts.storage, np.flatnonzero(category == "input"))]
    alike = facts.storage[(facts.category == HELD) & np.isin(facts.family, families)]
    category[alike[category[alike] == "unknown"]] = "input"
    return category
