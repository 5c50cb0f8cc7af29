"""The allocators' own records: the CPU's count of bytes, and CUDA's ring of the last events.

torch counts the bytes of its CPU allocator in all threads once `AllocatorTable` is enabled, and reports the count
with each event to a profiler; no API returns it. The counter is a field of an object whose address the library
exports (`c10::profiledCPUMemoryReporter`). The field is found by trial: two allocations of odd sizes must change it
by exactly these sizes, and no other field.

torch keeps the history of CUDA's allocator itself, with a Python stack for each entry (about 2 µs); it is written to
disk only when the job runs out of memory, and when it ends normally. Semi-private, therefore feature-tested.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import inspect
import pickle
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C import _profiler

from memprof.recorder.clock import clock_ns
from memprof.recorder.device_sampling import describe_cuda
from memprof.recorder.light.log import LightLog
from memprof.recorder.profiler.listener import find_listener
from memprof.recorder.profiler.native import AllocatorTable
from memprof.recorder.profiler.sessions import ProfilerSession
from memprof.recorder.profiler.torch_library import open_library
from memprof.trace.files.spool import SNAPSHOT_AT_END, SNAPSHOT_AT_FAILURE
from memprof.trace.files.whole_file import whole_file

_LIBRARIES = ("libc10.so", "libc10.dylib")
_ENTRY = "_ZN3c1025profiledCPUMemoryReporterEv"
_WORDS = 20
_TRIALS = (1_234_567, 765_431)
_TRIES = 3
_Storage: Any = torch.UntypedStorage  # not annotated in torch
#: Entries of the history that torch keeps; each takes at most a few kB of host memory.
_MOST_ENTRIES = 100_000
#: A job that repeatedly runs out of memory and continues is not blocked by a snapshot each time.
_BETWEEN_SNAPSHOTS_S = 10.0
_PROTOCOL = 4
_FIRST_RESTING = 2
_memory: Any = torch.cuda.memory  # not annotated in torch


class AllocatorCount:
    """The count, once found.

    Attributes:
        word: The counter itself, None before it is found.
        high: Its highest value since this was last set to 0, while a listener runs (`ExactCount`); else 0.
    """

    def __init__(self) -> None:
        self.word: ctypes.c_size_t | None = None
        self.high = ctypes.c_int64()

    def find(self) -> bool:
        """Searches for the counter; the allocator's table must be enabled.

        Returns:
            Whether it was found; it may be missing in a torch built differently.
        """
        words = _words()
        for _ in range(_TRIES if words else 0):  # another thread may allocate at the same moment
            found = set(range(len(words)))
            for size in _TRIALS:
                found &= _moved_by(words, size)
            if len(found) == 1:
                self.word = words[found.pop()]
                return True
        return False

    @property
    def is_found(self) -> bool:
        """Whether the counter can be read."""
        return self.word is not None

    def read(self) -> int:
        """Returns the bytes allocated now; 0 where the counter was not found."""
        return 0 if self.word is None else self.word.value

    def take_high(self) -> int:
        """Returns the highest number of bytes since the last call, as far as known."""
        high = self.high.value
        self.high.value = 0
        return max(high, self.read())


class ExactCount:
    """Has the listener, where it is built, find the highest count between two readings.

    In a process with one thread, the allocator's own table then rests from the third step on: by then the job's
    threads, and the warnings of torch's that come once, are there.

    The first thread that starts wakes it for good, before it runs.

    Attributes:
        is_resting: The table rests.
        is_sound: No thread was met while the table rested.
    """

    def __init__(self, count: AllocatorCount, table: AllocatorTable, *, is_allowed: bool) -> None:
        """Starts off.

        Args:
            count: Receives the highest count.
            table: The allocator's table, enabled.
            is_allowed: No plan applies, which may have sessions of its own.
        """
        self._count, self._table, self._is_allowed = count, table, is_allowed
        self._session = ProfilerSession()
        self._has_threads = False
        self._starts: list[tuple[Any, str, Any, Any]] = []  # module, name, what is there, and what waits in its place
        self.is_resting, self.is_sound = False, True

    @property
    def is_running(self) -> bool:
        """Whether it listens."""
        return self._session.is_running

    def start(self, step: int) -> bool:
        """Listens to a step that begins; returns whether it does."""
        listener = find_listener()
        if listener is None or not self._is_allowed or not self._count.is_found:
            return False
        if not self._session.is_running:
            memory = _profiler.RecordScope.LITE_INTERPRETER
            if not self._session.start(memory, profile_memory=True, keeps_events=False):
                return False
            self._count.high = listener.high
        if step >= _FIRST_RESTING and not self.is_resting and not self.see_threads():
            self.is_resting = True
            self._table.rest(is_resting=True)
            self._await_threads()
        return self.is_sound

    def see_threads(self) -> bool:
        """Returns whether the process has other threads, or had any: the table does not rest then."""
        if not self._has_threads and (threading.active_count() > 1 or _is_distributed()):
            self._has_threads = True
            self.is_sound = not self.is_resting
            self._wake()
        return self._has_threads

    def stop(self) -> None:
        """Stops, in the thread that it listens to."""
        self._wake()
        self._session.stop()
        self._count.high.value = 0

    def _wake(self) -> None:
        if self.is_resting:
            self.is_resting = False
            self._table.rest(is_resting=False, has_gaps=not self.is_sound)
        for module, name, found, made in self._starts:
            if getattr(module, name) is made:  # the job may have put something of its own there
                setattr(module, name, found)
        self._starts.clear()

    def _await_threads(self) -> None:
        """Wakes the table when Python next starts a thread."""

        def wait_for(start: Any) -> Any:
            @functools.wraps(start)
            def wake_and_start(*args: Any, **kwargs: Any) -> Any:
                if self.is_resting:
                    self._has_threads = True
                    self._wake()
                return start(*args, **kwargs)

            return wake_and_start

        for module in (threading, _thread):
            for name in ("_start_new_thread", "start_new_thread", "_start_joinable_thread", "start_joinable_thread"):
                if (found := getattr(module, name, None)) is not None:
                    self._starts.append((module, name, found, wait_for(found)))
                    setattr(module, name, self._starts[-1][3])


def _is_distributed() -> bool:
    """Whether torch has process groups, some of which have threads of their own."""
    distributed: Any = torch.distributed
    return bool(distributed.is_available() and distributed.is_initialized())


def _words() -> list[ctypes.c_size_t]:
    library = open_library(_LIBRARIES)
    if library is None or not hasattr(library, _ENTRY):
        return []
    entry = getattr(library, _ENTRY)
    entry.restype = ctypes.c_void_p
    start = entry()
    size = ctypes.sizeof(ctypes.c_size_t)
    return [ctypes.c_size_t.from_address(start + size * place) for place in range(_WORDS)]


def _moved_by(words: list[ctypes.c_size_t], size: int) -> set[int]:
    """Returns the indices of the words that rise by `size` with an allocation of that size, and fall back on free."""
    before = [word.value for word in words]
    trial = _Storage(size)  # not an operator, which a mode of the job's would see
    during = [word.value for word in words]
    del trial
    after = [word.value for word in words]
    return {
        place
        for place, (low, high, end) in enumerate(zip(before, during, after, strict=True))
        if high - low == size and end == low
    }


@dataclass(frozen=True)
class DeviceCount:
    """Counters of the current device's allocator.

    Attributes:
        allocated_bytes: Allocated now.
        reserved_bytes: Reserved in segments now.
        new_peak_bytes: Its peak, if that has risen since the last call; else 0.
    """

    allocated_bytes: int
    reserved_bytes: int
    new_peak_bytes: int


class CudaHistory:
    """The history of CUDA's allocator in this process."""

    def __init__(self, folder: Path) -> None:
        """Stores the folder for snapshots; see `start`."""
        self._folder = folder
        self._peak = 0
        self._snapshot_s = -_BETWEEN_SNAPSHOTS_S
        self._is_own = False
        self._is_over = False

    @classmethod
    def start(cls, log: LightLog) -> CudaHistory:
        """Starts, once CUDA is in use. A history that the job itself keeps is left unchanged, and read."""
        history = cls(log.main_folder)
        log.record("counted_device", f"cuda:{torch.cuda.current_device()}")
        log.record("device", describe_cuda(torch.cuda.current_device()))
        is_on = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        if is_on is not None and is_on():
            log.record("notes", "the job keeps CUDA's memory history itself: its settings were not changed")
        elif hasattr(_memory, "_record_memory_history"):
            options = {"context": "all", "stacks": "python", "max_entries": _MOST_ENTRIES}
            if "global_record_annotations" in inspect.signature(_memory._record_memory_history).parameters:
                options["global_record_annotations"] = True
            _memory._record_memory_history("all", **options)
            history._is_own = True
        else:
            log.record("notes", "this torch has no CUDA memory history: only counters were recorded")
        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            attach(history._observe)
        log.turn()
        log.record_in_ring("begin", {"step": 0, "time_ns": clock_ns()})
        return history

    def read(self) -> DeviceCount:
        """Reads the current device's allocator; its peak is read, never reset."""
        counts = torch._C._cuda_memoryStats(torch.cuda.current_device())
        allocated = counts["allocated_bytes"]["all"]
        peak = int(allocated["peak"])
        is_new = peak > self._peak
        self._peak = peak  # lower where the job has reset it
        reserved = int(counts["reserved_bytes"]["all"]["current"])
        return DeviceCount(int(allocated["current"]), reserved, peak if is_new else 0)

    def finish(self) -> None:
        """Writes the final snapshot, and stops the history if it was started here."""
        self._is_over = True
        self._write(SNAPSHOT_AT_END)
        if self._is_own:
            _memory._record_memory_history(None)

    def _observe(self, device: int, requested: int, total: int, free: int) -> None:
        """Called by the allocator when an allocation fails, before the job sees the error."""
        try:
            now = time.monotonic()
            if not self._is_over and now - self._snapshot_s >= _BETWEEN_SNAPSHOTS_S:
                self._snapshot_s = now
                self._write(SNAPSHOT_AT_FAILURE)
        except Exception:  # noqa: BLE001 - an exception in here would replace the job's own error
            self._is_over = True

    def _write(self, name: str) -> None:
        """Writes a snapshot atomically.

        Raises:
            OutputError: The disk is full.
        """
        if not hasattr(_memory, "_snapshot"):
            return
        with whole_file(self._folder / name, is_private=True) as file:
            pickle.dump(_memory._snapshot(), file, protocol=_PROTOCOL)
