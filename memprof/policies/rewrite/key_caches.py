"""Finds where a cache of keys and values begins, in models that return one from every forward.

A cache of transformers begins as two empty tensors of the keys' type, to which the first keys and values are
concatenated, one after the other. The recording has no storage for an empty tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.trace.schema import NONE, Ints

if TYPE_CHECKING:
    from memprof.trace.step import Step

#: Operators before the first values within which the empty tensors are made.
_NEAR = 8


def first_values(step: Step) -> Ints:
    """Returns the operators that put the first values into a cache; those before each put the first keys into it."""
    ops, uses = step.ops, step.uses
    reads = np.bincount(uses.op_id[uses.role == "read"], minlength=len(ops))
    is_empty = (ops.name == "aten.lift_fresh.default") & (np.bincount(uses.op_id, minlength=len(ops)) == 0)
    is_first = (ops.name == "aten.cat.default") & (reads == 1)
    values = np.flatnonzero(is_first[1:] & is_first[:-1] & (ops.module_id[1:] == ops.module_id[:-1])) + 1
    empty = np.append(0, np.cumsum(is_empty))
    found: Ints = values[empty[values] - empty[np.maximum(values - _NEAR, 0)] >= 2]
    return found


def cached_storages(step: Step) -> Ints:
    """Returns the storages that were made for a cache of keys and values."""
    values = first_values(step)
    created = step.storages.created_op_id
    return np.flatnonzero(np.isin(created, np.append(values, values - 1)) & (created != NONE))
