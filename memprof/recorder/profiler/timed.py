"""Measures the time of each operator in a step without the dispatch mode, with torch's C++ profiler."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch._C import _profiler

from memprof.recorder.log import RawLog
from memprof.recorder.profiler.sessions import ProfilerSession

_cuda: Any = torch.cuda  # not annotated in torch


class OperatorTimes:
    """Times every operator of the thread that started it, and the work each starts on a device."""

    def __init__(self, log: RawLog) -> None:
        """Stores the recorder's log."""
        self._log = log
        self._has_device = False
        self._session = ProfilerSession()

    @property
    def is_running(self) -> bool:
        """Whether a session is running."""
        return self._session.is_running

    def start(self) -> bool:
        """Starts timing; returns False if the job's own profiler is warming up or running."""
        self._has_device = has_device_activities()
        wait_for_device()  # otherwise work of the previous step is counted
        return self._session.start(_profiler.RecordScope.FUNCTION, profile_memory=False, with_device=self._has_device)

    def stop(self) -> None:
        """Stops, and logs the times, parents before children."""
        if not self.is_running:
            return
        wait_for_device()  # Kineto records work when it ends
        result = self._session.stop()
        if result is None:
            return
        on_device = device_time_ns(result) if self._has_device else {}
        times, kernels = self._log.times, self._log.kernels
        intern = self._log.intern
        first = self._log.time_count
        row = 0
        pending: list[tuple[Any, int]] = [(event, 0) for event in reversed(result.experimental_event_tree())]
        while pending:
            event, depth = pending.pop()
            times.extend((intern("names", event.name), event.start_time_ns, event.duration_time_ns, depth))
            if on_device and event.correlation_id in on_device:
                # Once: nested calls of the same operator share its correlation id.
                kernels.extend((first + row, on_device.pop(event.correlation_id)))
            row += 1
            pending.extend((child, depth + 1) for child in reversed(event.children))
        self._log.time_count += row

    def abandon(self) -> None:
        """Drops the session in a forked child."""
        self._session.stop()


def has_device_activities() -> bool:
    """Whether a device is in use whose work Kineto can time."""
    supported: Any = torch.profiler.supported_activities  # not annotated in torch
    return bool(_cuda.is_initialized() and _profiler.ProfilerActivity.CUDA in supported())


def wait_for_device() -> None:
    """Waits until the CUDA device has finished its queued work, if one is in use."""
    if _cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


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
