"""Everything that tells of memory while operators are recorded, switched on and off together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from memprof.recorder.device.history import AllocatorHistory
from memprof.recorder.device.sampling import Devices, unheard_device
from memprof.recorder.log import RawLog
from memprof.recorder.memory.watch import StorageWatch
from memprof.recorder.profiler.native import NativeEvents


class MemorySources:
    """Native events where this torch has them, else weak references; on a device its allocator's history beside them.

    Storages on a device whose allocator reports nothing are followed by weak references in any case.

    Attributes:
        is_open: Whether they listen.
        native: The native events, of which the job's own profiler must not hear.
    """

    def __init__(self, log: RawLog, *, can_hear: bool) -> None:
        """Listens to nothing yet.

        Args:
            log: Where everything goes.
            can_hear: Whether native events would be complete.
        """
        self.is_open = False
        self.native = NativeEvents(log)
        self._log = log
        self._can_hear = can_hear and NativeEvents.is_available()
        self._storages = StorageWatch(log)
        self._history: Any = AllocatorHistory(log)
        self._devices: Any = Devices(log)
        self._is_native = True

    @property
    def is_native(self) -> bool:
        """Whether native events are the source."""
        return self._is_native

    @property
    def on_output(self) -> Callable[[torch.Tensor, int], None] | None:
        """What must be shown every output of an operator and the moment; None where nothing asks for it."""
        return self._storages.watch if not self._is_native or self._storages.only else None

    @property
    def remember(self) -> Callable[[torch.Tensor], None] | None:
        """What must be shown every tensor that is there already; None where the sources hear of its end."""
        return None if self._is_native and not self._storages.only else self._storages.remember

    def follow_only(self, name: str, owned_span: Callable[[torch.Tensor], tuple[int, int]]) -> None:
        """Follows storages by weak references alone, for no allocator is asked for memory.

        Args:
            name: Name of this source.
            owned_span: Tells where a tensor's storage would be, and its bytes.
        """
        self._can_hear = False
        self._storages.name, self._storages.owned_span = name, owned_span

    def hear_of(self, name: str, device: Any) -> None:
        """Hears of one device alone, which tells everything itself; nothing else is followed.

        Args:
            name: Name of this source.
            device: Takes the place of the allocator's history and of the driver's samples, with their methods.
        """
        self.follow_only(name, lambda _tensor: (0, 0))
        self._history = self._devices = device

    def start(self) -> None:
        """Starts to listen."""
        self._is_native = self._can_hear and self.native.start()
        self._storages.only = unheard_device() if self._is_native else ""
        self._storages.start()
        name = self.native.name if self._is_native else self._storages.name
        self._log.record("epochs", {"op": self._log.op_count, "time_ns": time.time_ns(), "source": name})
        self._history.start()  # what is in use then belongs to this epoch
        self._devices.sample()
        self.is_open = True

    def follow(self, tensor: torch.Tensor) -> None:
        """Follows the end of a tensor that is there already, whatever the source."""
        self._storages.remember(tensor)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Is told that a storage was given another size by no operator, which native events would have told."""
        self._storages.resized(storage)

    def cut(self) -> None:
        """Logs what was heard so far, and goes on. Never call inside backward."""
        if self.is_open:
            (self.native if self._is_native else self._storages).cut()
            # CUDA may be in use since the first batch only.
            if self._history.is_running:
                self._history.cut()
            else:
                self._history.start()
            self._devices.sample()

    def stop(self) -> None:
        """Logs what was heard, and stops."""
        if self.is_open:
            self.is_open = False
            (self.native if self._is_native else self._storages).stop()
            self._storages.stop()
            self._history.stop()
            self._devices.sample()

    def abandon(self) -> None:
        """Stops without logging: after a fault, or in a forked child."""
        self.forget()
        self.native.abandon()
        self._history.abandon()

    def forget(self) -> None:
        """Follows no storage any more: the recording is over."""
        self._storages.abandon()
