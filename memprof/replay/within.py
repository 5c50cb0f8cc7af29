"""Finds steps that need not be replayed, because no plan gives them a higher peak than another step's."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memprof.replay.live import live_bytes
from memprof.trace.schema import Storages
from memprof.trace.step import Step


def is_within(step: Step, other: Step) -> bool:
    """Returns whether a step runs another's operators on storages that are nowhere larger or longer lived.

    Storages that take no memory on the device are not compared, nor are the tails of blocks that a device's allocator
    does not split: they depend on which block was free (``replay/unsplit.py``).

    Args:
        step: The step that may be skipped.
        other: The step that covers it.
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
