"""Adds up the work on a device that each operator of the timed step started (Kineto's CUDA activities)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

#: Types of Kineto's device events: CUDA (ROCm's too), XPU, others'.
_ON_DEVICE = ("CUDA", "HIP", "XPU", "PrivateUse1")


def device_time_ns(result: Any) -> dict[int, int]:
    """Returns the time on the device by correlation id of the operator that started it.

    Kernels, copies and fills count; an operator that started several is charged for all.

    Args:
        result: What torch's profiler found; its device events name the operator they are linked to, as
            torch.autograd.profiler reads them.
    """
    work: dict[int, int] = defaultdict(int)
    for event in result.events():
        linked = event.linked_correlation_id()
        if linked > 0 and event.device_type().name in _ON_DEVICE:
            work[linked] += event.duration_ns()
    return dict(work)
