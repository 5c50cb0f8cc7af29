"""Decides what each storage is for, from what was stated about it and from who made and who reads it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.schema import NONE, Bools, Ints, Texts
from memprof.trace.spool import ACTIVATION, BUFFER, GRADIENT, HELD, INPUT, OPTIMIZER_STATE, PARAMETER

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
    """

    created_op: Ints
    use_op: Ints
    use_storage: Ints
    phase: Texts
    is_recompute: Bools

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
    is_other = phase == "other"
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
    for code, text in reversed(_SETTLED):
        category[facts.about(code, storages)] = text
    # The data set, and batches made ahead and not used yet, look like the batches that were used.
    families = facts.family[np.isin(facts.storage, np.flatnonzero(category == "input"))]
    alike = facts.storage[(facts.category == HELD) & np.isin(facts.family, families)]
    category[alike[category[alike] == "unknown"]] = "input"
    return category
