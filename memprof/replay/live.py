"""Live bytes at every operator of a step, and steps that need not be replayed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from memprof.trace.schema import CATEGORIES, NONE, Bools, Ints, Storages
from memprof.trace.step import Step, sum_at

#: Categories live at the start of a step; prediction errors concern what it makes in addition.
FOUND = ("parameter", "buffer", "optimizer_state", "input")


@dataclass(frozen=True, eq=False)
class LiveBytes:
    """Allocated bytes around each operator; arrays of shape ``(ops,)``.

    Attributes:
        before: Live before the operator.
        during: Peak while it runs: outputs and temporaries on top of the live bytes before.
        after: Live after the storages that die with it are freed; equal to ``before`` of the next.
    """

    before: Ints
    during: Ints
    after: Ints


def live_bytes(step: Step) -> LiveBytes:
    """Replays the births and deaths of a step.

    Storages freed after an operator are freed before the next one allocates, and after its own outputs exist.
    """
    born = step.born_bytes()
    after = step.bytes_at_start() + np.cumsum(born - step.freed_bytes())
    before = after - born + step.freed_bytes()
    return LiveBytes(before=before, during=before + born + step.ops.workspace_bytes, after=after)


def live_bytes_by_category(step: Step) -> dict[str, Ints]:
    """Splits ``live_bytes(step).during`` by memory category.

    Returns:
        Bytes by category, each of shape ``(ops,)``: the categories that occur, in the schema's order, and
        ``workspace``. They sum to ``during`` exactly at every operator.
    """
    storages, ops = step.storages, len(step.ops)
    present = set(storages.category)
    known = [category for category in CATEGORIES if category in present or category == "workspace"]
    split = {
        category: sum_during(storages.take(storages.category == category), ops)
        for category in [*known, *sorted(present - set(known))]
    }
    split["workspace"] = split["workspace"] + step.ops.workspace_bytes
    return split


def made_bytes(step: Step) -> Ints:
    """Returns the live bytes during each operator except weights, optimizer state and inputs, shape ``(ops,)``."""
    is_found = np.isin(step.storages.category, FOUND)
    made: Ints = live_bytes(step).during - sum_during(step.storages.take(is_found), len(step.ops))
    return np.maximum(made, 0)


def sum_during(storages: Storages, ops: int, amounts: Ints | None = None) -> Ints:
    """Sums an amount over the storages live during each operator, including those freed right after it.

    Args:
        storages: Storages of a step.
        ops: Number of its operators.
        amounts: The amount of each storage; its allocated bytes if omitted.

    Returns:
        The sums, shape ``(ops,)``.
    """
    amounts = storages.allocated_bytes if amounts is None else amounts
    born = sum_at(storages.created_op_id, amounts, ops)
    freed = sum_at(storages.freed_op_id, amounts, ops)
    during: Ints = amounts[storages.created_op_id == NONE].sum() + np.cumsum(born) - (np.cumsum(freed) - freed)
    return during


def alive_at(step: Step, op_id: int) -> Bools:
    """Returns which storages are live while an operator runs, shape ``(storages,)``.

    Includes those it makes and those freed right after it.
    """
    created, freed = step.storages.created_op_id, step.storages.freed_op_id
    alive: Bools = (created <= op_id) & ((freed == NONE) | (freed >= op_id))
    return alive


def peak_op(step: Step) -> int:
    """Returns the first operator with the peak live bytes.

    Raises:
        ValueError: The step has no operators.
    """
    return int(np.argmax(live_bytes(step).during))


def is_within(step: Step, other: Step) -> bool:
    """Returns whether a step runs another's operators on storages that are nowhere larger or longer lived.

    Storages that take no memory on the device are not compared, nor are the tails of blocks that a device's allocator
    does not split: they depend on which block was free (``replay/rounding.py``).
    """
    mine, others = _in_order(step.storages), _in_order(other.storages)
    return (
        len(step.ops) == len(other.ops)
        and len(mine) == len(others)
        and bool((step.ops.name == other.ops.name).all())
        and bool((step.ops.module_id == other.ops.module_id).all())
        and bool((mine.created_op_id == others.created_op_id).all())
        and bool((mine.freed_op_id == others.freed_op_id).all())
        and bool((mine.requested_bytes <= others.requested_bytes).all())
        and bool((step.ops.workspace_bytes <= other.ops.workspace_bytes).all())
    )


def _in_order(storages: Storages) -> Storages:
    """Returns the storages that take memory, by when they are allocated and freed, then by size.

    Those from before a step have no order of their own.
    """
    taken = storages.take(storages.allocated_bytes > 0)
    return taken.take(np.lexsort((taken.requested_bytes, taken.freed_op_id, taken.created_op_id)))


def distinct_steps(lead: Step, others: Iterable[Step]) -> tuple[Step, ...]:
    """Returns the steps that may exceed a leading one's peak under some plan, highest peak first.

    Args:
        lead: The step that is always replayed; not among those returned.
        others: All other steps.
    """
    kept = [lead]
    for step in sorted(others, key=lambda one: -int(live_bytes(one).during.max(initial=0))):
        if not any(is_within(step, one) for one in kept):
            kept.append(step)
    return tuple(kept[1:])


def fullest_of(steps: Iterable[Step]) -> Step:
    """Returns the step with the highest peak; ties go to the first."""
    return max(steps, key=lambda step: int(np.max(live_bytes(step).during, initial=0)))
