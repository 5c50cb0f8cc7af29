"""The budget of host memory: what a job takes there already, and what is left for a plan's copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memprof.analysis.host.host_forecast import HostForecast, describe_fewer_workers, loaders_of
from memprof.analysis.host.host_use import HostUse
from memprof.errors import UsageError
from memprof.machines.catalogue import Accelerator, machine_of_device
from memprof.planners.search.request import SearchRequest
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.store import Trace
from memprof.units import format_bytes


def with_host(request: SearchRequest, trace: Trace, machine: Accelerator | None, targets_device: bool) -> SearchRequest:
    """Returns a search request with the room that a job leaves in host memory.

    Without a budget of the host, the limit that was closest while the job ran counts, if the job ran on the device that
    is planned for. Where host and device share one memory, what the job takes of the host is taken off the budget.

    Args:
        request: The request, with the budget as given.
        trace: The recording.
        machine: The target machine; None for the recording's own.
        targets_device: Whether the job ran on, or is planned for, a device with memory of its own.

    Raises:
        UsageError: The job's host memory leaves nothing of a memory that device and host share.
    """
    if not targets_device:
        return request  # of a job on the CPU, the budget is host memory itself
    recorded_on = trace.manifest.machine
    device = machine or machine_of_device(recorded_on.device_name)
    is_unified = request.is_unified or (device is not None and device.is_unified)
    use = HostUse.of(trace)
    used = host_bytes_of(trace, use)
    if is_unified:
        if request.host.job_bytes is not None:
            raise UsageError("host= bounds host memory of its own; here host and device share one: give one size")
        left = request.budget_bytes - used
        if left <= 0:
            raise UsageError(
                f"the job takes {format_bytes(used)} of host memory, and the budget for host and device together is "
                f"{format_bytes(request.budget_bytes)}: give more, or reduce what the job holds there"
            )
        return replace(request, is_unified=True, budget_bytes=left, host_used_bytes=used)
    if request.host.job_bytes is not None:
        limit, room = f"host={format_bytes(request.host.job_bytes)}", request.host.job_bytes - used
    elif use.limit is not None and _ran_there(trace, machine):
        limit = f"{format_bytes(use.limit.total_bytes)} ({use.limit.name})"
        room = use.limit.total_bytes - use.limit.used_bytes
    else:
        return request
    pinned = request.host.pinned_bytes
    most = room if pinned is None else min(room, pinned)
    return replace(request, most_host_bytes=most, host_used_bytes=used, host_limit=limit)


def host_bytes_of(trace: Trace, use: HostUse) -> int:
    """Returns the most host memory of all processes of a job on one node; of a dry run, the most to expect.

    Tensors that a job on the CPU had are left out, as they are planned for a device.
    """
    forecast = HostForecast.of(trace, use)
    if forecast is not None:
        return forecast.bounds[1]
    tensors = max(trace.step_peaks().values(), default=0) if trace.manifest.machine.device_kind == "cpu" else 0
    return max(use.total_bytes - tensors, 0)


def _ran_there(trace: Trace, machine: Accelerator | None) -> bool:
    """Returns whether a job ran, for real, on the machine that is planned for."""
    recorded_on = trace.manifest.machine
    is_real = trace.manifest.backend.name != DRY_RUN and recorded_on.device_kind != "cpu"
    return is_real and (machine is None or machine_of_device(recorded_on.device_name) is machine)


def describe_host(request: SearchRequest, trace: Trace, short_bytes: int = 0) -> Iterator[str]:
    """Yields what a job takes of host memory, what is left for copies, and what helps where that is too little.

    Args:
        request: The request, as of `with_host`.
        trace: The recording.
        short_bytes: By how much the closest plan exceeds it.
    """
    used = format_bytes(request.host_used_bytes)
    if request.is_unified:
        whole = format_bytes(request.budget_bytes + request.host_used_bytes)
        yield f"host and device share one memory: of {whole}, the job's processes take {used} on the host."
    if request.most_host_bytes is None or not request.host_limit:
        return
    most = request.most_host_bytes
    if request.host_used_bytes == 0:
        yield f"the host memory of the job itself is not known; copies may take {format_bytes(most)}."
    elif most >= 0:
        yield f"host memory: the job takes {used}; {format_bytes(most)} of {request.host_limit} are left for copies."
    else:
        over = format_bytes(-most)
        yield f"the job itself takes {used} of host memory, {over} more than {request.host_limit}: it would be killed."
    short = max(short_bytes, -most)
    if short > 0:
        yield from filter(None, [describe_fewer_workers(loaders_of(trace, HostUse.of(trace)), short)])
