"""Reads the number of allocated bytes from a device's allocator."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Protocol

import torch

from memprof.errors import PolicyError
from memprof.recorder.light.count import AllocatorCount
from memprof.recorder.memory.live_objects import live_objects
from memprof.recorder.profiler.native import AllocatorTable

_NO_COUNT = "remat needs the allocator's count of allocated bytes, which this build of torch does not provide."


class Counter(Protocol):
    """Allocated bytes of one device."""

    def used_bytes(self) -> int:
        """Returns the live bytes."""
        ...

    def lacks_bytes(self, need_bytes: int, budget_bytes: int) -> int:
        """Returns how many bytes are missing for a further allocation; 0 or less if it fits."""
        ...

    def close(self) -> None:
        """Stops counting."""
        ...


class ProcessorCounter:
    """The CPU allocator's count.

    It is complete if started with the process. If started later, live storages are found among Python's objects and
    added; their later deallocation is subtracted here, unless they were already counted when allocated.
    """

    _is_whole = False

    def __init__(self) -> None:
        """Starts counting.

        Raises:
            PolicyError: This torch version has no such counter.
        """
        was_on = AllocatorTable.is_kept()
        self._table, self._count = AllocatorTable(), AllocatorCount()
        self._table.switch_on(is_late=not was_on)
        if not self._count.find() or (word := self._count.word) is None:
            self._table.switch_off()
            raise PolicyError(_NO_COUNT)
        self._word = word
        self._older_bytes = 0
        self._older: dict[int, weakref.ref[Any]] = {}
        if not ProcessorCounter._is_whole:
            before = self._count.read()
            for storage in _live_storages():
                self._add_older(storage, is_counted=was_on)
            self._older_bytes -= before

    @classmethod
    def begin_early(cls) -> None:
        """Starts the allocator's count for the life of the process, before the job's first tensor."""
        if not AllocatorTable.is_kept():
            cls._is_whole = True
            AllocatorTable().switch_on(is_late=False)

    def used_bytes(self) -> int:
        """Returns the live bytes."""
        return self._word.value + self._older_bytes

    def lacks_bytes(self, need_bytes: int, budget_bytes: int) -> int:
        """Returns how many bytes are missing for a further allocation; 0 or less if it fits."""
        return self._word.value + self._older_bytes + need_bytes - budget_bytes

    def close(self) -> None:
        """Stops counting."""
        self._table.switch_off()

    def _add_older(self, storage: torch.UntypedStorage, *, is_counted: bool) -> None:
        size, key = storage.nbytes(), storage._cdata
        self._older_bytes += size
        if not is_counted:
            self._older[key] = weakref.ref(storage, partial(self._forget, key, size))

    def _forget(self, key: int, size_bytes: int, _: Any) -> None:
        self._older_bytes -= size_bytes
        del self._older[key]


def _live_storages() -> list[torch.UntypedStorage]:
    """Lists the storages in host memory that Python's objects hold."""
    found: dict[int, torch.UntypedStorage] = {}
    for value in live_objects(torch.Tensor):
        if type(value).__module__.partition(".")[0] != "torch":
            continue
        for tensor in (value, value.grad if value.is_leaf else None):
            if tensor is not None and tensor.layout is torch.strided and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage
    return list(found.values())


class DeviceCounter:
    """CUDA caching allocator's count, read only if an upper bound of it does not fit: a read takes 20 us."""

    def __init__(self, device: torch.device) -> None:
        """Stores the device."""
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._bound = self.used_bytes()

    def used_bytes(self) -> int:
        """Returns the live bytes."""
        self._bound = int(torch._C._cuda_memoryStats(self._device)["allocated_bytes"]["all"]["current"])
        return self._bound

    def lacks_bytes(self, need_bytes: int, budget_bytes: int) -> int:
        """Returns how many bytes are missing for a further allocation; 0 or less if it fits."""
        if self._bound + need_bytes > budget_bytes:
            self.used_bytes()
        self._bound += need_bytes
        return self._bound - budget_bytes

    def close(self) -> None:
        """Does nothing: there is nothing to stop."""


def counter_of(device: torch.device) -> Counter:
    """Returns the counter of a device.

    Raises:
        PolicyError: Its allocator has no counter.
    """
    if device.type == "cpu":
        return ProcessorCounter()
    if device.type == "cuda":
        return DeviceCounter(device)
    raise PolicyError(f"remat supports CUDA devices and CPUs, and this model is on {device.type}.")
