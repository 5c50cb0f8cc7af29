"""Measures time: of each operator in a step without the dispatch mode, and a CUDA device's speed.

To measure its speed, a separate process would have to wait for the device's memory, and would not see the device as
the job did. So the measurement runs inside the job, last before its process ends: memprof's exit handler is
registered before any of the job's, and therefore runs after them. By then no loss, random number or peak is read any
more. No random numbers are drawn, and no more memory is allocated than is free.

Not validated on hardware: written against CUDA's documentation and tested against a stand-in, for want of a device.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch._C import _profiler

from memprof.recorder.log import RawLog
from memprof.recorder.profiler.sessions import ProfilerSession
from memprof.trace.files.private_file import write_private

_cuda: Any = torch.cuda  # not annotated in torch
#: File in the process's folder of the spool; ``trace.assemble`` reads it.
FILE_NAME = "speed.json"
#: Bytes per copy, on the device and over the link.
_DEVICE_BYTES, _HOST_BYTES = 256 * 2**20, 32 * 2**20
#: Limit on the memory used, as a share of the free memory.
_SHARE = 1 / 4
#: Rows and columns of the matrices: enough for the full rate of the largest devices.
_ROWS = 4096
#: Timed runs of each, after one to load its kernel; the fastest counts.
_RUNS = 5


class OperatorTimes:
    """Times every operator of the thread that started it, and the work each starts on a device."""

    def __init__(self, log: RawLog) -> None:
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


def write_device_speed(folder: Path, torch: Any = torch) -> None:
    """Measures the CUDA device that this process used, if any, and writes the result to its folder of the spool.

    Args:
        folder: The process's folder; nothing is measured if it recorded nothing.
        torch: The module, or a stand-in.
    """
    # Checked first: probing for a device takes time, and may initialize it.
    if not torch.cuda.is_initialized() or not folder.is_dir():
        return
    try:
        speed = measure_cuda(torch)
    except Exception as error:  # noqa: BLE001 - the job has ended normally: a device error must not change that
        speed = {"how": f"not measured: {type(error).__name__}: {error}".splitlines()[0]}
    try:
        write_private(folder / FILE_NAME, json.dumps(speed))
    except OSError:
        return  # a full disk: the recording itself is complete, without the speed


def measure_cuda(torch: Any) -> dict[str, Any]:
    """Measures the current device: memory, both directions of the link, and products in fp32 and bf16.

    fp32 products run with the job's settings: with TF32 if it allows that.

    Returns:
        The fields of ``memprof.trace.manifest.Speed``, without those that need more memory than is free.
    """
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    # The allocator's cached memory is free too.
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    room = int(free * _SHARE)
    speed: dict[str, Any] = {}
    with torch.no_grad():
        size = min(_DEVICE_BYTES, room // 2)
        if size >= 2**20:
            source = torch.full((size,), 1, dtype=torch.uint8, device="cuda")
            target = torch.empty_like(source)
            speed["memory_bytes_per_us"] = 2 * size / _fastest_us(torch, lambda: target.copy_(source))
            part = min(_HOST_BYTES, size)
            host = torch.full((part,), 1, dtype=torch.uint8, device="cpu", pin_memory=True)
            on_device = source[:part]
            to_host = _fastest_us(torch, lambda: host.copy_(on_device, non_blocking=True))
            from_host = _fastest_us(torch, lambda: on_device.copy_(host, non_blocking=True))
            speed["to_host_bytes_per_us"] = part / to_host
            speed["from_host_bytes_per_us"] = part / from_host
            del source, target, on_device
        for name, dtype, item in (("fp32", torch.float32, 4), ("bf16", torch.bfloat16, 2)):
            if 3 * _ROWS**2 * item > room or (name == "bf16" and not torch.cuda.is_bf16_supported()):
                continue
            ones = torch.full((_ROWS, _ROWS), 1.0, dtype=dtype, device="cuda")
            out = torch.empty_like(ones)
            fastest = _fastest_us(torch, _product(torch, ones, out))
            speed[f"{name}_flops_per_us"] = 2 * _ROWS**3 / fastest
    speed["how"] = f"measured with torch on {torch.cuda.get_device_name()} at the end of the job"
    return speed


def _product(torch: Any, ones: Any, out: Any) -> Any:
    return lambda: torch.matmul(ones, ones, out=out)


def _fastest_us(torch: Any, run: Any) -> float:
    """Returns the fastest of several runs by the device's own clock, in microseconds."""
    run()
    fastest = float("inf")
    for _ in range(_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        fastest = min(fastest, begin.elapsed_time(end) * 1e3)  # events report milliseconds
    return max(fastest, 1e-3)
