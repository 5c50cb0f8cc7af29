"""Describes the devices a job uses, and samples the memory use of each as a whole."""

from __future__ import annotations

from typing import Any

import torch

from memprof.recorder.clock import clock_ns
from memprof.recorder.device.driver import Driver, driver_version
from memprof.recorder.log import RawLog

_cuda: Any = torch.cuda  # not annotated in torch


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
                    self._sample_cuda(index, reserved)
        elif is_mps_in_use():
            self._sample_mps()

    def _sample_cuda(self, index: int, reserved: int) -> None:
        name = f"cuda:{index}"
        if index not in self._described:
            record = describe_cuda(index)
            self._described[index] = record["uuid"]
            self._log.record("device", record)
        free, total = torch.cuda.mem_get_info(index)
        process = self._driver.process_bytes(self._described[index]) if self._described[index] else -1
        self._add(name, total, total - free, process, reserved, _pinned_bytes())

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
