"""Reduces a recorded step to a rank's part of the batch."""

from __future__ import annotations

import dataclasses

import numpy as np

from memprof.policies.accumulate.batch import find_batch, part_sizes
from memprof.policies.accumulate.scale import scale_step
from memprof.policies.rewrite.draft import Draft
from memprof.trace.schema import NONE
from memprof.trace.step import Step


def with_part_of_batch(step: Step, ranks: int) -> Step:
    """Scales everything that grows with the batch to the largest part of any rank.

    Args:
        step: The recorded step.
        ranks: Number of ranks that divide each batch.

    Raises:
        PolicyError: The batch of the step cannot be determined.
    """
    batch = find_batch(step)
    parts = part_sizes(batch.size, ranks)[:1]
    repeats = np.isin(step.ops.phase, ("forward", "backward"))
    scaled = scale_step(step, batch, parts, repeats)
    draft = Draft(step)
    every = np.arange(len(step.ops))
    draft.ops = scaled.ops(every, np.zeros(len(every), dtype=np.int64), repeats)
    rows = np.arange(len(step.storages))
    draft.storages = scaled.storages(rows, np.zeros(len(rows), dtype=np.int64), np.full(len(rows), NONE))
    draft.duration_us = scaled.duration_us(draft.ops)
    return dataclasses.replace(draft.build(), number=step.number)
