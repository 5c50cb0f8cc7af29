"""How far a micro-batch may exceed its share where samples differ in size: graphs, sets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.accumulate.batch import find_batch
from memprof.replay.live import made_bytes
from memprof.trace.step import Step

#: How many standard deviations of a micro-batch's size a recording is expected to contain.
_DEVIATIONS = 2.0


def excess_of(steps: Sequence[Step], micro_batches: int) -> float:
    """Returns by what fraction the largest micro-batch may exceed its share of the largest recorded batch.

    Where no two recorded steps have the same batch size, batches consist of items that vary in number, such as the
    nodes of graphs. A standard deviation of s per batch becomes s / sqrt(parts) per part, relatively more. Where two
    have the same size, samples are alike or padded: no part exceeds its share.

    Args:
        steps: The recorded steps.
        micro_batches: Parts per batch.
    """
    if len(steps) < 2:
        return 0.0
    try:
        sizes = {find_batch(step).size for step in steps}
    except PolicyError:  # nothing to split; the transform reports it
        return 0.0
    if len(sizes) < len(steps):
        return 0.0
    made = np.array([made_bytes(step).max(initial=0) for step in steps], dtype=np.float64)
    largest = made.mean() + _DEVIATIONS * made.std(ddof=1) * np.sqrt(micro_batches)
    return max(0.0, float(largest / max(made.max(), 1.0)) - 1.0)
