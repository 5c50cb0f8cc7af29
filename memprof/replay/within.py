"""Tells steps that can be left out when several are replayed: no plan makes them fuller than another one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memprof.replay.live import live_bytes
from memprof.trace.step import Step


def is_within(step: Step, other: Step) -> bool:
    """Tells whether a step runs the operators of another one on storages that are nowhere larger and no longer alive.

    Args:
        step: The step that may be left out.
        other: The step that stands for it.
    """
    mine, others = step.storages, other.storages
    return (
        len(step.ops) == len(other.ops)
        and len(mine) == len(others)
        and bool((step.ops.name == other.ops.name).all())
        and bool((step.ops.module_id == other.ops.module_id).all())
        and bool((mine.created_op_id == others.created_op_id).all())
        and bool((mine.freed_op_id == others.freed_op_id).all())
        and bool((mine.allocated_bytes <= others.allocated_bytes).all())
        and bool((step.ops.workspace_bytes <= other.ops.workspace_bytes).all())
    )


def distinct_steps(lead: Step, others: Iterable[Step]) -> tuple[Step, ...]:
    """Returns the steps that may be fuller than a leading one under some plan, the fullest first.

    Args:
        lead: The step that is replayed in any case; it is not among those returned.
        others: All others.
    """
    kept = [lead]
    for step in sorted(others, key=lambda one: -int(live_bytes(one).during.max(initial=0))):
        if not any(is_within(step, one) for one in kept):
            kept.append(step)
    return tuple(kept[1:])


def fullest_of(steps: Iterable[Step]) -> Step:
    """Returns the step with the highest peak, the first of equals."""
    return max(steps, key=lambda step: int(np.max(live_bytes(step).during, initial=0)))
