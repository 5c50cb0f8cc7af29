"""How much larger a micro-batch may be than its share, where the samples of a job differ in size: graphs, sets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.accumulate.batch import find_batch
from memprof.replay.live import made_bytes
from memprof.trace.step import Step

#: How many standard deviations of a micro-batch's size are expected to be met in a recording.
_DEVIATIONS = 2.0


def excess_of(steps: Sequence[Step], micro_batches: int) -> float:
    """Returns by what share the largest micro-batch may exceed its part of the fullest recorded batch.

    Where no two recorded steps have a batch of the same size, the batch consists of things that differ in number, such
    as the nodes of its graphs. What varies by s in a batch varies by s / sqrt(parts) in a part of it, so relatively
    more. Where two have the same size, samples are alike, or padded: no part exceeds its share.

    Args:
        steps: The steps as recorded.
        micro_batches: Parts of a batch.
    """
    if len(steps) < 2:
        return 0.0
    try:
        sizes = {find_batch(step).size for step in steps}
    except PolicyError:  # without a batch there is nothing to split, which the transform says
        return 0.0
    if len(sizes) < len(steps):
        return 0.0
    made = np.array([made_bytes(step).max(initial=0) for step in steps], dtype=np.float64)
    largest = made.mean() + _DEVIATIONS * made.std(ddof=1) * np.sqrt(micro_batches)
    return max(0.0, float(largest / max(made.max(), 1.0)) - 1.0)
