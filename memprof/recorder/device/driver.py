"""Reads a device's memory use from the driver (NVML): by all processes, and by this one.

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

_LIBRARY = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
_OK, _TOO_SMALL = 0, 7
#: NVML's value for a process whose memory is unknown (nvml.h, NVML_VALUE_NOT_AVAILABLE).
_UNKNOWN = 2**64 - 1
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


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
        """Opens nothing yet.

        Args:
            library: The library, if already open.
        """
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
