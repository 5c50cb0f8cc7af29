"""A change to an imported step: what it does to the sizes and lives of its storages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from memprof.policies.rewrite.draft import Draft
from memprof.replay.live import sum_during
from memprof.trace.schema import NONE, Bools, Ints, Memory, Storages
from memprof.trace.step import Step


@dataclass(frozen=True)
class Change:
    """One way to lower the peak.

    Attributes:
        policy: Name of the policy that does it to a job.
        what: What is changed, in words.
        advice: How to apply it.
        numerics: Its effect on the numbers the job computes, one of ``policies.base.NUMERICS``.
        is_formula: Sizes are by formula, with an assumption that the snapshot does not show; else the recorded ones
            are replayed in another order.
        assumes: That assumption, as a clause; "" where there is none.
        errors: Largest errors of predicted peaks on dry runs, as shares: how far the measured peak was below and above.
        frees_gradients: Gradients do not last until the update.
        transform: Returns the step under the change; raises PolicyError where the snapshot does not allow it.
    """

    policy: str
    what: str
    advice: str
    numerics: str
    transform: Callable[[Step], Step]
    is_formula: bool = False
    assumes: str = ""
    errors: tuple[float, float] = (0.0, 0.0)
    frees_gradients: bool = False


def of_category(step: Step, *categories: str) -> Bools:
    """Returns which storages are of some categories, shape ``(storages,)``."""
    found: Bools = np.isin(step.storages.category, categories)
    return found


def phase_rows(step: Step, phase: str) -> Ints:
    """Returns the operators of a phase, in order."""
    return np.flatnonzero(step.ops.phase == phase)


def made_in(step: Step, phase: str) -> Bools:
    """Returns which storages are made in a phase of the step, shape ``(storages,)``."""
    created = step.storages.created_op_id
    found: Bools = (created != NONE) & (step.ops.phase[np.maximum(created, 0)] == phase)
    return found


def resized(step: Step, rows: Bools | Ints, sizes: Ints | int) -> Step:
    """Returns a step in which some storages have other sizes; recorded counters are dropped.

    Args:
        step: The step.
        rows: The storages.
        sizes: Bytes of each.
    """
    allocated, requested = step.storages.allocated_bytes.copy(), step.storages.requested_bytes.copy()
    allocated[rows] = requested[rows] = sizes
    storages = step.storages.replace(allocated_bytes=allocated, requested_bytes=requested)
    return replace(step, storages=storages, memory=Memory.empty())


def divided(step: Step, rows: Bools, parts: int) -> Step:
    """Returns a step in which some storages are a part of their size, rounded up.

    Args:
        step: The step.
        rows: The storages.
        parts: What they are divided by.
    """
    return resized(step, rows, -(-step.storages.allocated_bytes[rows] // parts))


def with_block(step: Step, category: str, device: str, size_bytes: int, created: int, freed: int) -> Step:
    """Returns a step with one storage more.

    Args:
        step: The step.
        category: Its category.
        device: Its device.
        size_bytes: Its size.
        created: Operator that allocates it.
        freed: Operator after which it is freed; NONE to keep it.
    """
    draft = Draft(step)
    draft.insert_storages(
        Storages.of(
            category=[category],
            device=[device],
            requested_bytes=[size_bytes],
            allocated_bytes=[size_bytes],
            created_op_id=[created],
            freed_op_id=[freed],
        )
    )
    return draft.build()


def most_at_once(step: Step, rows: Bools) -> int:
    """Returns how many of some storages are alive at once, at most."""
    if not rows.any():
        return 0
    chosen = step.storages.take(rows)
    return int(sum_during(chosen, len(step.ops), np.ones(len(chosen), dtype=np.int64)).max())
