"""Describes the devices a job uses, and samples the memory use of each, also from the driver (NVML).

NVML is called through ctypes, so that nothing is added to the job's modules; without it, or in a container that hides
processes from the driver, only the device total is available.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

from memprof.recorder.clock import clock_ns
from memprof.recorder.log import RawLog

_cuda: Any = torch.cuda  # not annotated in torch
_LIBRARY = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
_OK, _TOO_SMALL = 0, 7
#: NVML's value for a process whose memory is unknown (nvml.h, NVML_VALUE_NOT_AVAILABLE).
_UNKNOWN = 2**64 - 1
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


class Devices:
    """The devices on which torch's allocators hold memory in this process."""

    def __init__(self, log: RawLog) -> None:
        """Stores the recorder's log; queries nothing yet."""
        self._log = log
        self._driver = Driver()
        self._described: dict[int, str] = {}  # uuid by device index

    def sample(self) -> None:
        """Logs the memory use of each device; a new device is also described.

        Does nothing if no device is in use, or while a CUDA graph is captured, which such queries would invalidate.
        """
        if _cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            for index in range(torch.cuda.device_count()):
                reserved = torch.cuda.memory_reserved(index)
                if reserved:
                    name = f"cuda:{index}"
                    if index not in self._described:
                        record = describe_cuda(index)
                        self._described[index] = record["uuid"]
                        self._log.record("device", record)
                    free, total = torch.cuda.mem_get_info(index)
                    process = self._driver.process_bytes(self._described[index]) if self._described[index] else -1
                    self._add(name, total, total - free, process, reserved, _pinned_bytes())
        elif is_mps_in_use():
            self._sample_mps()

    def _sample_mps(self) -> None:
        used, total = torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory()
        if -1 not in self._described:
            self._described[-1] = ""
            self._log.record("device", {"device": "mps:0", "kind": "mps", "name": "MPS", "capacity_bytes": total})
        self._add("mps:0", total, used, used, used, -1)

    def _add(self, device: str, total: int, used: int, process: int, reserved: int, pinned: int) -> None:
        number = self._log.intern("devices", device)
        self._log.device_memory.extend((clock_ns(), number, total, used, process, reserved, pinned))


def describe_cuda(index: int) -> dict[str, Any]:
    """Returns the manifest's description of a CUDA device (or a ROCm one, which torch names CUDA)."""
    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", ""))
    is_rocm = torch.version.hip is not None
    return {
        "device": f"cuda:{index}",
        "kind": "rocm" if is_rocm else "cuda",
        "name": properties.name,
        "capacity_bytes": properties.total_memory,
        "uuid": f"GPU-{uuid}" if uuid and not uuid.startswith(("GPU-", "MIG-")) else uuid,
        "compute": f"{properties.major}.{properties.minor}",
        "driver": "" if is_rocm else driver_version(),
        "cuda": str(torch.version.hip if is_rocm else torch.version.cuda or ""),
        "allocator": _cuda.get_allocator_backend(),
    }


def is_mps_in_use() -> bool:
    """Whether this is a Mac on whose GPU torch has allocated memory."""
    return torch.backends.mps.is_available() and torch.mps.driver_allocated_memory() > 0


def device_without_events() -> str:
    """Returns the type of a device whose allocator keeps no history that is read, such as mps; "" if there is none.

    CUDA's and ROCm's own allocator keeps one. Storages on other devices are followed one by one.
    """
    found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if found is None or found.type == "cpu":
        return ""
    return "" if found.type == "cuda" and _cuda.get_allocator_backend() == "native" else found.type


def _pinned_bytes() -> int:
    """Returns the bytes of pinned host memory held by torch; -1 if this torch does not count them."""
    count = getattr(torch.cuda, "host_memory_stats", None)
    return int(count().get("allocated_bytes.current", -1)) if count is not None else -1


class ProcessInfo(ctypes.Structure):
    """One process on a device (nvml.h, nvmlProcessInfo_v2_t, shared by versions 2 and 3 of the call)."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Driver:
    """NVIDIA's management library, opened on first use."""

    def __init__(self, library: Any = None) -> None:
        """Opens nothing yet."""
        self._library = library
        self._is_open = False
        self._handles: dict[str, ctypes.c_void_p | None] = {}

    def process_bytes(self, uuid: str, pid: int | None = None) -> int:
        """Returns the memory of a device held by a process: context, allocator segments, NCCL and other libraries.

        Args:
            uuid: The device, such as ``GPU-6f3c…``.
            pid: The process; this one by default.

        Returns:
            Bytes; -1 if the driver does not report them.
        """
        handle = self._handle(uuid)
        if handle is None:
            return -1
        return bytes_of(self._processes(handle), os.getpid() if pid is None else pid)

    def _handle(self, uuid: str) -> ctypes.c_void_p | None:
        if uuid not in self._handles:
            handle = ctypes.c_void_p()
            is_found = self._open() and (
                self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) == _OK
            )
            self._handles[uuid] = handle if is_found else None
        return self._handles[uuid]

    def _open(self) -> bool:
        if not self._is_open:
            try:
                self._library = self._library or ctypes.CDLL(_LIBRARY)
                self._is_open = self._library.nvmlInit_v2() == _OK
            except (OSError, AttributeError):
                self._library = None
        return self._is_open

    def _processes(self, handle: ctypes.c_void_p) -> list[ProcessInfo]:
        call = getattr(self._library, "nvmlDeviceGetComputeRunningProcesses_v3", None) or getattr(
            self._library, "nvmlDeviceGetComputeRunningProcesses_v2", None
        )
        room = 64
        while call is not None and room <= 65_536:
            count, found = ctypes.c_uint(room), (ProcessInfo * room)()
            answer = call(handle, ctypes.byref(count), found)
            if answer != _TOO_SMALL:
                return list(found[: count.value]) if answer == _OK else []
            room *= 4
        return []


def bytes_of(processes: list[ProcessInfo], pid: int) -> int:
    """Returns the bytes held by one of the processes; -1 if it is not listed or its use is unknown to the driver."""
    held = [info.used_bytes for info in processes if info.pid == pid and info.used_bytes != _UNKNOWN]
    return sum(held) if held else -1


def driver_version(text: str | None = None) -> str:
    """Returns the version of NVIDIA's driver, such as 580.65.06; "" if unavailable.

    Args:
        text: The kernel module's version text; read from the system by default.
    """
    if text is None:
        try:
            text = _DRIVER_FILE.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", text)
    return found[1] if found else ""
