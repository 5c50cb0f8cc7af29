"""Reports a virtual device to a recording in the format of real devices."""

from __future__ import annotations

from memprof.machines.card import Card
from memprof.recorder.clock import clock_ns
from memprof.recorder.device.snapshot import segment_records
from memprof.recorder.dry.device.memory import VirtualMemory
from memprof.recorder.log import RawLog


class VirtualEvents:
    """Replaces the allocator's history and the driver's samples (`recorder.sources`)."""

    def __init__(self, log: RawLog, memory: VirtualMemory, card: Card) -> None:
        """Stores the components; logs nothing yet.

        Args:
            log: Destination of the rows.
            memory: The device's memory.
            card: Properties of the device.
        """
        self.is_running = False
        self._log = log
        self._memory = memory
        self._card = card
        self._is_described = False

    def start(self) -> bool:
        """Logs the blocks in use, and everything from now on."""
        if not self.is_running:
            self._memory.log_to(self._log)
            self.is_running = True
        return True

    def cut(self) -> None:
        """Does nothing: everything is logged as it happens."""

    def stop(self) -> None:
        """Logs the current segments, and stops."""
        if self.is_running:
            segments = segment_records(self._memory.snapshot()["segments"])
            self._log.record("segments", {"time_ns": clock_ns(), "segments": segments})
            self.abandon()

    def abandon(self) -> None:
        """Stops without logging."""
        self.is_running = False
        self._memory.log_to(None)

    def sample(self) -> None:
        """Logs the memory use of the whole device, and describes it the first time."""
        log, card, memory = self._log, self._card, self._memory
        if not self._is_described:
            self._is_described = True
            log.record("device", card.describe(memory.device))
        reserved = memory.reserved_bytes
        used = reserved + card.context_bytes
        number = log.intern("devices", memory.device)
        log.device_memory.extend((clock_ns(), number, card.capacity_bytes, used, used, reserved, -1))
