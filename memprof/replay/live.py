"""Bytes alive at every operator of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.schema import CATEGORIES, NONE, Bools, Ints, Storages
from memprof.trace.step import Step, sum_at

#: What a step finds when it begins; the errors of predictions are in what it makes besides.
_FOUND = ("parameter", "buffer", "optimizer_state", "input")


@dataclass(frozen=True, eq=False)
class LiveBytes:
    """Allocated bytes around each operator; each of shape ``(ops,)``.

    Attributes:
        before: Alive before the operator.
        during: The allocator's highest count while it runs: its outputs and its temporaries on top of what was alive.
        after: Alive once what dies with it is freed; equal to ``before`` of the next.
    """

    before: Ints
    during: Ints
    after: Ints


def live_bytes(step: Step) -> LiveBytes:
    """Replays the births and deaths of a step.

    What is freed after an operator leaves before the next one takes memory, and after its own outputs exist.
    """
    born = step.born_bytes()
    after = step.bytes_at_start() + np.cumsum(born - step.freed_bytes())
    before = after - born + step.freed_bytes()
    return LiveBytes(before=before, during=before + born + step.ops.workspace_bytes, after=after)


def live_bytes_by_category(step: Step) -> dict[str, Ints]:
    """Splits ``live_bytes(step).during`` by what the memory is for.

    Returns:
        Bytes by category, each of shape ``(ops,)``: the categories that occur, in the schema's order, and
        ``workspace``. At every operator they sum to ``during`` exactly.
    """
    storages, ops = step.storages, len(step.ops)
    present = set(storages.category)
    known = [category for category in CATEGORIES if category in present or category == "workspace"]
    split = {
        category: _during(storages.take(storages.category == category), ops)
        for category in [*known, *sorted(present - set(known))]
    }
    split["workspace"] = split["workspace"] + step.ops.workspace_bytes
    return split


def made_bytes(step: Step) -> Ints:
    """Returns the bytes alive during each operator beside weights, optimizer state and inputs, shape ``(ops,)``."""
    is_found = np.isin(step.storages.category, _FOUND)
    made: Ints = live_bytes(step).during - _during(step.storages.take(is_found), len(step.ops))
    return np.maximum(made, 0)


def live_bytes_by_module(step: Step) -> dict[int, Ints]:
    """Splits ``live_bytes(step).during`` by the module that owns or made the memory.

    Returns:
        Bytes by ``module_id``, ``NONE`` for what belongs to none, each of shape ``(ops,)``. What an operator holds
        for itself counts with the operator's own module. At every operator they sum to ``during`` exactly.
    """
    storages, ops = step.storages, step.ops
    modules = np.union1d(storages.module_id, ops.module_id)
    return {
        int(module): _during(storages.take(storages.module_id == module), len(ops))
        + np.where(ops.module_id == module, ops.workspace_bytes, 0)
        for module in modules
    }


def _during(storages: Storages, ops: int) -> Ints:
    """Returns the bytes of some storages alive during each operator; what is freed after it is alive still."""
    born = sum_at(storages.created_op_id, storages.allocated_bytes, ops)
    freed = sum_at(storages.freed_op_id, storages.allocated_bytes, ops)
    at_start = storages.allocated_bytes[storages.created_op_id == NONE].sum()
    during: Ints = at_start + np.cumsum(born) - (np.cumsum(freed) - freed)
    return during


def alive_at(step: Step, op_id: int) -> Bools:
    """Returns which storages are alive while an operator runs, shape ``(storages,)``.

    Those it makes and those freed right after it are alive.
    """
    created, freed = step.storages.created_op_id, step.storages.freed_op_id
    alive: Bools = (created <= op_id) & ((freed == NONE) | (freed >= op_id))
    return alive


def peak_op(step: Step) -> int:
    """Returns the first operator during which most bytes are alive.

    Raises:
        ValueError: The step has no operators.
    """
    return int(np.argmax(live_bytes(step).during))
