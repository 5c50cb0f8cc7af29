"""Sums the device work started by each operator of the timed step (Kineto's CUDA activities)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

#: Types of Kineto's device events: CUDA (and ROCm), XPU, others.
_ON_DEVICE = ("CUDA", "HIP", "XPU", "PrivateUse1")


def device_time_ns(result: Any) -> dict[int, int]:
    """Returns the device time, in ns, by correlation id of the operator that started the work.

    Kernels, copies and fills count; an operator that started several is charged for all.

    Args:
        result: The result of torch's profiler; its device events carry the id of the operator they are linked to, as
            read by torch.autograd.profiler.
    """
    work: dict[int, int] = defaultdict(int)
    for event in result.events():
        linked = event.linked_correlation_id()
        if linked > 0 and event.device_type().name in _ON_DEVICE:
            work[linked] += event.duration_ns()
    return dict(work)
