"""Records every allocation from torch's own allocators, temporaries inside kernels included.

The allocator reports to torch's C++ profiler while one runs with memory events only, or to the listener that takes its
place. A flag of the allocator, `FLAGS_caffe2_report_cpu_memory_usage`, makes it maintain its table of live blocks from
the start of the process and for all threads: frees of older memory are then reported too, without the warning it
prints otherwise.

CUDA's caching allocator reports to the same profiler. Of these reports torch hands out the time and the size of the
block, not its address, which comes from the allocator's own history (`recorder.device_history`). Backward on a device
runs in its own threads, to which the session is propagated.

Semi-private, therefore feature-tested: `NativeEvents.is_available()`.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch._C import _autograd, _profiler

from memprof.recorder.clock import clock_ns
from memprof.recorder.log import RawLog
from memprof.recorder.profiler.listener import Heard, find_listener
from memprof.recorder.profiler.sessions import ProfilerSession, has_proc, why_no_file
from memprof.recorder.profiler.torch_library import core_flag, log_level
from memprof.trace.files.spool import HEARD

_Allocation: Any = getattr(_profiler, "_ExtraFields_Allocation", None)
_CPU, _CUDA = torch.device("cpu"), _autograd.DeviceType.CUDA
_cuda: Any = torch.cuda  # not annotated in torch


class AllocatorTable:
    """The CPU allocator's table of live blocks: enabled at start, so that later frees have a size.

    It is reference-counted within a process: it stays enabled until its last user switches it off.
    """

    _users = 0

    def __init__(self) -> None:
        """Finds the allocator's flags; they may be missing in a torch built differently."""
        self._report = core_flag("FLAGS_caffe2_report_cpu_memory_usage", ctypes.c_bool)
        self._log_level = log_level()
        self._found_log_level: int | None = None
        self._is_quiet = False  # the log level is raised while it rests
        self._is_on = False

    @property
    def is_available(self) -> bool:
        """Whether the flag was found."""
        return self._report is not None

    @staticmethod
    def is_kept() -> bool:
        """Whether the table has any user in this process."""
        return AllocatorTable._users > 0

    def switch_on(self, *, is_late: bool) -> None:
        """Enables the allocator's table.

        Args:
            is_late: Memory was allocated before: freeing it makes the allocator warn on stderr about an unknown
                block. Its log level is raised to errors until `switch_off`, so that the job's stderr stays
                unchanged.
        """
        if not self._is_on:
            AllocatorTable._users += 1
        self._is_on = True
        if self._report is not None:
            self._report.value = True
        if is_late and self._log_level is not None:
            self._found_log_level = self._log_level.value
            self._log_level.value = max(self._log_level.value, 2)

    def rest(self, *, is_resting: bool, has_gaps: bool = False) -> None:
        """Leaves the table to a listener, which has this thread's allocations in it at a tenth of the time, or resumes.

        Others' threads are then missing: there must be none. What one that starts later allocates before `rest` ends
        is unknown to the table, of which the allocator would warn as of older memory.

        Args:
            is_resting: Whether the table is left to the listener now.
            has_gaps: There was such a thread: warnings are held back until `switch_off`.
        """
        if self._is_on and self._report is not None:
            self._report.value = not is_resting or AllocatorTable._users > 1
            if is_resting and self._found_log_level is None and self._log_level is not None:
                self._found_log_level = self._log_level.value
                self._log_level.value = max(self._log_level.value, 2)
                self._is_quiet = True
            elif not is_resting and self._is_quiet and not has_gaps:
                self._restore_log_level()

    def switch_off(self) -> None:
        """Restores the allocator's flags, unless already done: another recorder may have enabled them since."""
        if not self._is_on:
            return
        self._is_on = False
        AllocatorTable._users -= 1
        if self._report is not None and not AllocatorTable._users:
            self._report.value = False
        self._restore_log_level()

    def _restore_log_level(self) -> None:
        self._is_quiet = False
        if self._found_log_level is not None:
            self._log_level.value = self._found_log_level
            self._found_log_level = None


class NativeEvents:
    """Allocation events of the thread that started it, from torch's C++ profiler."""

    name = "native"
    needs_outputs = False
    #: Called with the ``allocations`` of every session that ends: no other session can run meanwhile.
    listeners: ClassVar[list[Callable[[array[int]], None]]] = []

    def __init__(self, log: RawLog) -> None:
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
                (_profiler, "_ExtraFields_Allocation"),
            )
        ) and bool(torch.profiler.kineto_available())

    @classmethod
    def initialize(cls) -> None:
        """Initializes torch's profiler in this thread, which has imported torch; in any other thread it warns."""
        session = ProfilerSession()
        if cls.is_available():
            session.start(_profiler.RecordScope.LITE_INTERPRETER, profile_memory=False)
            session.stop()

    @property
    def is_running(self) -> bool:
        """Whether a session is running."""
        return self._session.is_running

    def start(self) -> bool:
        """Starts recording; returns False if the job's own profiler is warming up or running, or there is no /proc.

        Raises:
            OSError: The job can open no file, and torch's profiler reads one at every start.
        """
        reason = "" if find_listener() is not None else why_no_file()
        if reason and has_proc():
            raise OSError(f"torch's profiler cannot start: {reason}")
        # A scope that no training job enters: a session must never end inside a scope whose begin it recorded, since
        # leaving that scope then writes to the session's freed memory. Every optimizer hook runs inside one.
        return self._session.start(_profiler.RecordScope.LITE_INTERPRETER, profile_memory=True)

    def cut(self) -> None:
        """Logs the events so far and continues. Never call inside backward: the engine holds the session then."""
        if self.is_running:
            self.stop()
            self.start()

    def stop(self) -> None:
        """Logs the events and stops; nothing is logged if the job's profiler has taken over."""
        result = self._session.stop()
        if result is None:
            return
        events, device_sizes = self._log.events, self._log.device_sizes
        allocated = allocations(result)
        events.extend(allocated)
        if _cuda.is_initialized():
            for time_ns, device, size in device_sizes_of(result):
                device_sizes.extend((time_ns, self._log.intern("devices", f"cuda:{device}"), size))
        events.extend((clock_ns(), *HEARD))
        for listener in self.listeners:
            listener(allocated)

    def abandon(self) -> None:
        """Drops the session in a forked child."""
        self._session.stop()


def allocations(result: Any) -> array[int]:
    """Returns the CPU's memory events of a session, in order of time: time, address, bytes, and the allocator's count.

    Reading an attribute of an event of torch's profiler takes from 0.1 to 1 us, and a step of tiny operators has
    thousands of events.
    """
    if isinstance(result, Heard):
        return result.cpu
    found = array("q")
    pending = result.experimental_event_tree()
    pending.reverse()
    while pending:
        event = pending.pop()
        fields = event.extra_fields
        if type(fields) is not _Allocation:
            pending.extend(reversed(event.children))
        elif (device := fields.device) == _CPU or device.type == "cpu":  # the latter takes six times as long
            # Nothing runs inside an allocation.
            found.extend((event.start_time_ns, fields.ptr, fields.alloc_size, fields.total_allocated))
    return found


def device_sizes_of(result: Any) -> list[tuple[int, int, int]]:
    """Lists CUDA's memory events of a session: time in nanoseconds, device, and bytes, negative for frees.

    They are not in the tree of torch's result: its roots are the CPU's events alone.
    """
    if isinstance(result, Heard):
        return list(zip(*(result.cuda[column::3] for column in range(3)), strict=True))
    return [
        (event.start_ns(), event.device_index(), event.nbytes())
        for event in result.events()
        if event.device_type() == _CUDA and event.name() == "[memory]"
    ]


def in_time(events: array[int]) -> list[tuple[int, int]]:
    """Returns the time and the bytes of ``allocations``, in order of time whatever the thread."""
    return sorted(zip(events[::4], events[2::4], strict=True), key=itemgetter(0))


def highest_of(sizes: list[tuple[int, int]]) -> tuple[int, int]:
    """Returns the peak bytes of some ``in_time``, counted from the first of them, and the bytes left."""
    total = highest = 0
    for _, size in sizes:
        total += size
        highest = max(highest, total)
    return highest, total


def device_name(device: torch.device) -> str:
    """Returns a device's name with its index, as tensors on it report it."""
    return f"{device.type}:{device.index or 0}"
