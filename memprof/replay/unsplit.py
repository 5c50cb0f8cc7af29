"""Bounds of the bytes that CUDA's caching allocator adds to large blocks by not splitting them.

In large segments the allocator splits a free block only where more than 1 MiB would remain
(c10/cuda/CUDACachingAllocator.cpp, ``should_split``): otherwise the request gets the whole block. Which free block
serves it depends on everything before, so a plan changes these bytes in ways that its sizes alone do not determine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.replay.allocator.rules import SMALL_REQUEST_BYTES
from memprof.replay.live import FOUND, live_bytes, sum_during
from memprof.replay.rounding import rounded_on_cuda
from memprof.trace.schema import Bools, Ints, Storages
from memprof.trace.step import Step

#: Standard deviations between the expected sum over live blocks and its upper bound.
_DEVIATIONS = 2.0


@dataclass(frozen=True)
class Unsplit:
    """By how much a job's large blocks exceed their requests.

    Attributes:
        mean_bytes: Mean over the large blocks of a step.
        deviation_bytes: Standard deviation over them.
    """

    mean_bytes: float
    deviation_bytes: float

    @staticmethod
    def of(step: Step) -> Unsplit:
        """Returns the figures of a recorded step; zeros where it has no large blocks, as on the CPU."""
        extra = _extra_bytes(step.storages.take(_is_large(step.storages)))
        return Unsplit(float(extra.mean()), float(extra.std())) if len(extra) else Unsplit(0.0, 0.0)

    def bounds_of_peak(self, step: Step) -> tuple[int, int]:
        """Returns the lower and the upper bound of a predicted step's peak, in bytes.

        Args:
            step: The predicted step. The lower bound assumes that its large blocks have the sizes of their requests.
        """
        large = step.storages.take(_is_large(step.storages))
        ops, during = len(step.ops), live_bytes(step).during
        without = during - sum_during(large, ops, _extra_bytes(large))
        count = sum_during(large, ops, np.ones(len(large), dtype=np.int64))
        most = without + count * self.mean_bytes + _DEVIATIONS * np.sqrt(count) * self.deviation_bytes
        return int(without.max(initial=0)), int(np.ceil(most.max(initial=0)))


def _is_large(storages: Storages) -> Bools:
    """Returns which storages are allocated anew in every step, in large segments of a device."""
    is_large = (storages.requested_bytes > SMALL_REQUEST_BYTES) & (storages.allocated_bytes > 0)
    is_large &= ~np.isin(storages.device, ("cpu", "", "meta")) & ~np.isin(storages.category, FOUND)
    return is_large


def _extra_bytes(storages: Storages) -> Ints:
    extra: Ints = storages.allocated_bytes - rounded_on_cuda(storages.requested_bytes)
    return np.maximum(extra, 0)
