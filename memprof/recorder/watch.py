"""Follows storages by weak references: their birth when an operator returns them, their death when they go.

It stands in for the native events where those are missing, and follows, beside them, memory older than they are.
"""

from __future__ import annotations

import time
import weakref

import torch

from memprof.recorder.inventory import owned_span
from memprof.recorder.log import RawLog
from memprof.trace.spool import HEARD


class _Reference(weakref.ref[torch.UntypedStorage]):
    """A weak reference that remembers which storage it was."""

    __slots__ = ("key",)
    key: int


class StorageWatch:
    """Logs births and deaths of the storages it is shown.

    It does not see memory that kernels take and give back within one operator.
    """

    name = "dispatch"
    needs_outputs = True

    def __init__(self, log: RawLog) -> None:
        """Shares the recorder's log."""
        self._log = log
        self._alive: dict[int, tuple[_Reference, int, int]] = {}
        self.is_running = False

    def start(self) -> bool:
        """Starts following."""
        self.is_running = True
        return True

    def cut(self) -> None:
        """Notes that all events up to now are logged; they are as they happen."""
        self._log.events.extend((time.time_ns(), *HEARD))

    def stop(self) -> None:
        """Forgets all storages."""
        if self.is_running:
            self.cut()
        self.is_running = False
        self._alive.clear()

    def abandon(self) -> None:
        """Forgets all storages in a forked child."""
        self.is_running = False
        self._alive.clear()

    def watch(self, tensor: torch.Tensor, moment_ns: int = 0) -> None:
        """Logs a tensor's storage as born at a moment (now, where none is given) unless it is known."""
        address, size = owned_span(tensor)
        if not address:
            return
        storage = tensor.untyped_storage()
        moment_ns = moment_ns or time.time_ns()
        key = storage._cdata  # unique among storages alive
        known = self._alive.get(key)
        if known is not None:
            reference, known_address, known_size = known
            if (known_address, known_size) == (address, size):
                return
            self._log.events.extend((moment_ns, known_address, -known_size, -1))  # it was resized
        else:
            reference = _Reference(storage, self._died)
            reference.key = key
        self._alive[key] = (reference, address, size)
        self._log.events.extend((moment_ns, address, size, -1))

    def _died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(reference, _Reference)
        known = self._alive.pop(reference.key, None)
        if known is not None and self.is_running:
            self._log.events.extend((time.time_ns(), known[1], -known[2], -1))
