"""All sources of memory events while operators are recorded, enabled and disabled together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.recorder.clock import clock_ns
from memprof.recorder.device_history import AllocatorHistory
from memprof.recorder.device_sampling import Devices, device_without_events
from memprof.recorder.log import RawLog
from memprof.recorder.memory.live_objects import StorageWatch
from memprof.recorder.profiler.native import NativeEvents


class MemorySources:
    """Native events if this torch has them, else weak references; on a device also its allocator's history.

    Storages on a device whose allocator reports nothing are always followed by weak references.

    Attributes:
        is_open: Whether the sources are recording.
        native: The native events, which the job's own profiler must not receive.
    """

    def __init__(self, log: RawLog, outside: StorageWatch, *, has_native_events: bool) -> None:
        """Starts with all sources off.

        Args:
            log: Destination of all rows.
            outside: Follows what none of the sources reports; who states it starts it.
            has_native_events: Whether native events would be complete.
        """
        self.is_open = False
        self.native = NativeEvents(log)
        self._log = log
        self._has_native_events = has_native_events and NativeEvents.is_available()
        self._storages, self._outside = StorageWatch(log), outside
        self._history: Any = AllocatorHistory(log)
        self._devices: Any = Devices(log)
        self._is_native = True

    @property
    def on_output(self) -> Callable[[torch.Tensor, int], None] | None:
        """Callback for every output of an operator, with its time; None if no source needs it."""
        return self._storages.watch if not self._is_native or self._storages.only else None

    @property
    def remember(self) -> Callable[[torch.Tensor], None] | None:
        """Callback for every existing tensor; None if the sources report its free themselves."""
        return None if self._is_native and not self._storages.only else self._storages.remember

    @property
    def on_change(self) -> Callable[[int], None] | None:
        """Called with each change of live bytes that weak references show; None for nothing."""
        return self._storages.on_change

    @on_change.setter
    def on_change(self, called: Callable[[int], None]) -> None:
        self._storages.on_change = called

    def follow_only(self, name: str, owned_span: Callable[[torch.Tensor], tuple[int, int]]) -> None:
        """Follows storages by weak references only, since no allocator is used.

        Args:
            name: Name of this source.
            owned_span: Returns the address a tensor's storage would have, and its bytes.
        """
        self._has_native_events = False
        self._storages.name, self._storages.owned_span = name, owned_span

    def follow_device(self, name: str, device: Any) -> None:
        """Records a single device that reports all its events itself; nothing else is followed.

        Args:
            name: Name of this source.
            device: Replaces the allocator's history and the driver's samples; has their methods.
        """
        self._outside.owned_span = lambda _tensor: (0, 0)
        self.follow_only(name, self._outside.owned_span)
        self._history = self._devices = device

    def start(self) -> None:
        """Starts all sources."""
        self._is_native = self._has_native_events and self.native.start()
        self._storages.only = device_without_events() if self._is_native else ""
        self._storages.start()
        name = self.native.name if self._is_native else self._storages.name
        self._log.record("epochs", {"op": self._log.op_count, "time_ns": clock_ns(), "source": name})
        self._history.start()  # blocks in use then belong to this epoch
        self._devices.sample()
        self.is_open = True

    def follow(self, tensor: torch.Tensor) -> None:
        """Follows an existing tensor until it is freed, whatever the source."""
        self._storages.remember(tensor)

    def follow_on_cpu(self, tensor: torch.Tensor) -> None:
        """Follows an existing tensor as `follow` does, unless it is on a device."""
        if tensor.device.type == "cpu":
            self._storages.remember(tensor)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Handles a storage resized outside any operator, which native events would have reported."""
        self._storages.resized(storage)

    def cut(self) -> None:
        """Logs the events so far, and continues. Never call inside backward."""
        if self.is_open:
            (self.native if self._is_native else self._storages).cut()
            # CUDA may have come into use with the first batch.
            if self._history.is_running:
                self._history.cut()
            else:
                self._history.start()
            self._devices.sample()

    def stop(self) -> None:
        """Logs the events, and stops."""
        if self.is_open:
            self.is_open = False
            (self.native if self._is_native else self._storages).stop()
            self._storages.stop()
            self._outside.is_running = False
            self._history.stop()
            self._devices.sample()

    def abandon(self) -> None:
        """Stops without logging: after a fault, or in a forked child."""
        self.forget()
        self.native.abandon()
        self._history.abandon()

    def forget(self) -> None:
        """Stops following storages: the recording is over."""
        self._storages.abandon()
        self._outside.abandon()
