"""Reads the number of allocated bytes from a device's allocator, and the peak of a job's first steps."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memprof.errors import PolicyError
from memprof.policies.remat.cells import Need
from memprof.recorder.light.allocators import AllocatorCount
from memprof.recorder.memory.live_objects import live_objects
from memprof.recorder.profiler.native import AllocatorTable

_NO_COUNT = "remat needs the allocator's count of allocated bytes, which this build of torch does not provide."
#: Backward passes after which the budget is set even if no optimizer of torch has been updated.
_MOST_PASSES = 16


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


Counter = ProcessorCounter | DeviceCounter


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


class FirstSteps:
    """Runs the job without a limit until a backward pass ends that began after the first update of an optimizer.

    Optimizers allocate their state in their first step: the peak that repeats is that of the steps after it.
    """

    def __init__(self, counter: Counter, share: float) -> None:
        self._counter = counter
        self._share = share
        self._highest_bytes = self._before_bytes = self._passes = 0
        self._has_updated = self._had_updated = False
        self._hook = register_optimizer_step_post_hook(self._updated)

    def step_begins(self) -> None:
        """Notes that autograd is about to save the first tensor."""
        self._had_updated = self._has_updated

    def begins(self) -> None:
        """Notes that an operator is about to run."""
        self._before_bytes = self._counter.used_bytes()

    def ran(self, need: Need) -> None:
        """Notes that it ran."""
        self._highest_bytes = max(self._highest_bytes, self._before_bytes + max(need.highest_bytes, 0))

    def step_ended(self) -> int:
        """Notes that autograd keeps nothing any more; returns the budget in bytes, 0 until the peak is known."""
        self._passes += 1
        if not self._had_updated and self._passes < _MOST_PASSES:
            return 0
        return int(self._highest_bytes * self._share)

    def stop(self) -> None:
        """Stops measuring."""
        self._hook.remove()

    def _updated(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._has_updated = True
