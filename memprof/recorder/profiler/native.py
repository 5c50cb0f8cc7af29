"""Hears of every allocation from torch's own allocators, temporaries inside kernels included.

The allocator reports to torch's C++ profiler while one runs with memory events only. A flag of the allocator,
`FLAGS_caffe2_report_cpu_memory_usage`, makes it keep its table of live blocks from the start of the process and
for all threads: frees of older memory are then reported too, without the warning it prints otherwise.

CUDA's and XPU's caching allocators report to the same profiler: blocks as they set them aside, and their own counts
of allocated and reserved bytes. Backward on a device runs in threads of its own, to which the session travels.

Semi-private, therefore tested for: `NativeEvents.is_available()`.
"""

from __future__ import annotations

import ctypes
import errno
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch._C import _autograd, _profiler

from memprof.recorder.log import RawLog
from memprof.recorder.profiler.core_library import core_flag, log_level
from memprof.recorder.profiler.sessions import ProfilerSession, can_open_files
from memprof.trace.files.spool import HEARD

_ALLOCATION = "Allocation"


class AllocatorTable:
    """The CPU allocator's table of live blocks: switched on at start, so that later frees have a size.

    Several may ask for it in one process: it stays on until the last of them has switched it off.
    """

    _users = 0

    def __init__(self) -> None:
        """Finds the allocator's flags; they may be missing in a torch built in another way."""
        self._report = core_flag("FLAGS_caffe2_report_cpu_memory_usage", ctypes.c_bool)
        self._log_level = log_level()
        self._found_log_level: int | None = None
        self._is_on = False

    @property
    def is_available(self) -> bool:
        """Whether the flag was found."""
        return self._report is not None

    @staticmethod
    def is_kept() -> bool:
        """Whether anybody has it kept in this process."""
        return AllocatorTable._users > 0

    def switch_on(self, *, is_late: bool) -> None:
        """Makes the allocator keep its table.

        Args:
            is_late: Memory was taken before: freeing it makes the allocator warn on stderr that it does not know
                the block. Its log level is raised to errors until `switch_off`, so that the job's stderr stays as
                it would be.
        """
        if not self._is_on:
            AllocatorTable._users += 1
        self._is_on = True
        if self._report is not None:
            self._report.value = True
        if is_late and self._log_level is not None:
            self._found_log_level = self._log_level.value
            self._log_level.value = max(self._log_level.value, 2)

    def switch_off(self) -> None:
        """Puts the allocator's flags back, unless that was done: another recorder may have switched them on since."""
        if not self._is_on:
            return
        self._is_on = False
        AllocatorTable._users -= 1
        if self._report is not None and not AllocatorTable._users:
            self._report.value = False
        if self._found_log_level is not None:
            self._log_level.value = self._found_log_level
            self._found_log_level = None


class NativeEvents:
    """Allocation events of the thread that started it, from torch's C++ profiler."""

    name = "native"
    needs_outputs = False
    #: Told of the allocations of every session that ends: others cannot hear for themselves while it runs.
    listeners: ClassVar[list[Callable[[list[Any]], None]]] = []

    def __init__(self, log: RawLog) -> None:
        """Shares the recorder's log."""
        self._log = log
        self._session = ProfilerSession()

    @staticmethod
    def is_available() -> bool:
        """Whether this torch has the entry points used here."""
        return all(
            hasattr(owner, name)
            for owner, name in (
                (_autograd, "_enable_profiler"),
                (_autograd, "_prepare_profiler"),
                (_autograd, "_disable_profiler"),
                (_autograd, "_profiler_enabled"),
                (_profiler, "ProfilerConfig"),
                (_profiler, "_ExperimentalConfig"),
            )
        ) and bool(torch.profiler.kineto_available())

    @classmethod
    def initialize(cls) -> None:
        """Makes torch's profiler set itself up in this thread, which has imported torch; it complains of any other."""
        session = ProfilerSession()
        if cls.is_available():
            session.start(_profiler.RecordScope.LITE_INTERPRETER, profile_memory=False)
            session.stop()

    @property
    def is_running(self) -> bool:
        """Whether it listens."""
        return self._session.is_running

    def start(self) -> bool:
        """Starts hearing; returns False when the job's own profiler warms up or runs, which must not be disturbed.

        Raises:
            OSError: The job may open no more files, and torch's profiler reads one at every start.
        """
        if not can_open_files():
            raise OSError(errno.EMFILE, "torch's profiler cannot start: the job may open no more files")
        # A scope that no training job enters: a session must never end inside a scope that it has seen begin, since
        # leaving that scope then writes to the session's freed memory. Every optimizer hook runs inside one.
        return self._session.start(_profiler.RecordScope.LITE_INTERPRETER, profile_memory=True)

    def cut(self) -> None:
        """Logs what was heard so far and goes on. Never call inside backward: the engine holds the session then."""
        if self.is_running:
            self.stop()
            self.start()

    def stop(self) -> None:
        """Logs what was heard and stops; nothing is logged where the job's profiler has taken over."""
        result = self._session.stop()
        if result is None:
            return
        events, device_events = self._log.events, self._log.device_events
        heard = allocations(result)
        for event in heard:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                events.extend((event.start_time_ns, fields.ptr, fields.alloc_size, fields.total_allocated))
            else:
                device = self._log.intern("devices", device_name(fields.device))
                device_events.extend(
                    (
                        event.start_time_ns,
                        device,
                        fields.ptr,
                        fields.alloc_size,
                        fields.total_allocated,
                        fields.total_reserved,
                    )
                )
        events.extend((time.time_ns(), *HEARD))
        for listener in self.listeners:
            listener(heard)

    def abandon(self) -> None:
        """Drops the session in a forked child."""
        self._session.stop()


def allocations(result: Any) -> list[Any]:
    """Lists the memory events of a profiler result, of all devices, in the order they happened."""
    found: list[Any] = []
    pending = list(reversed(result.experimental_event_tree()))
    while pending:
        event = pending.pop()
        if event.tag.name == _ALLOCATION:
            found.append(event)
        pending.extend(reversed(event.children))
    return found


def device_name(device: torch.device) -> str:
    """Returns a device's name with its number, as tensors on it say it."""
    return f"{device.type}:{device.index or 0}"
