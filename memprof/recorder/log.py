"""Buffers raw rows in memory and writes them to the spool in batches."""

from __future__ import annotations

import ctypes
import os
import sys
from array import array
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

from memprof.phases import MOST_NAMES
from memprof.recorder.clock import clock_ns
from memprof.recorder.faults import raise_if_of_job
from memprof.trace.files.spool import COLUMNS
from memprof.trace.files.spool_writer import SpoolWriter

if TYPE_CHECKING:
    import torch

_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Information(ctypes.Structure):
    """glibc's ``struct mallinfo2`` (malloc.h, since 2.33)."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


def _find() -> Any:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):  # another C library, or one that is older
        return None
    function.restype, function.argtypes = _Information, ()
    return function


_mallinfo2 = _find()


def heap_sizes() -> tuple[int, int]:
    """Returns the bytes in use in the C library's heap, and those freed but kept; (-1, -1) where it does not tell.

    Torch's tensors and numpy's arrays are in it. Where another allocator, such as jemalloc, is preloaded, both are
    small.
    """
    if _mallinfo2 is None:
        return -1, -1
    found = _mallinfo2()
    return found.uordblks + found.hblkhd, found.fordblks


#: Bound at import: a job may replace the builtin and count its calls.
_open = open
#: Least time between two samples of the heaps, and about the most of them.
_HEAP_NS, _HEAP_SAMPLES = 500_000_000, 1000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


#: Note in a recording of a job that names more phases than a recording can hold.
TOO_MANY_NAMES = f"the job names more than {MOST_NAMES} phases: further names were not recorded"


class RawLog:
    """Buffers of raw rows; texts are interned, so rows contain only numbers.

    The buffers are plain lists of ints, extended in place by the observers: the cheapest option in Python.

    Attributes:
        names_left_out: The job names more phases than a recording can hold.
    """

    def __init__(self, writer: SpoolWriter) -> None:
        self._writer = writer
        self.operators: list[int] = []
        self.touches: list[int] = []
        self.events: list[int] = []
        self.calls: list[int] = []
        self.alive: list[int] = []
        self.facts: list[int] = []
        self.times: list[int] = []
        self.reads: list[int] = []
        self.rss: list[int] = []
        self.heap: list[int] = []
        self.marks: list[int] = []
        self.nodes: list[int] = []
        self.step_peaks: list[int] = []
        self.module_peaks: list[int] = []
        self.device_events: list[int] = []
        self.device_sizes: list[int] = []
        self.device_alive: list[int] = []
        self.history: list[int] = []
        self.kernels: list[int] = []
        self.streams: list[int] = []
        self.device_memory: list[int] = []
        self.names_left_out = False
        self.op_count = 0
        self.time_count = 0
        self.flushed_ns = clock_ns()
        self._began_ns, self._next_heap_ns = self.flushed_ns, 0
        self._interned: dict[str, dict[Hashable, int]] = {}
        self._fresh: dict[str, list[Any]] = {}
        self._tensors: dict[tuple[Any, ...], int] = {}

    def intern(self, stream: str, key: Hashable, text: Any = None) -> int:
        """Returns the number of a text (or of any JSON value, identified by key), assigning one if it is new."""
        known = self._interned.setdefault(stream, {})
        number = known.get(key)
        if number is None:
            number = known[key] = len(known)
            self._fresh.setdefault(stream, []).append(key if text is None else text)
        return number

    def phase_number(self, name: str) -> int:
        """Returns the number of a phase named by the job, -1 once the recording's limit of names is reached."""
        known = self._interned.setdefault("phases", {})
        if name not in known and len(known) >= MOST_NAMES:
            self.names_left_out = True
            return -1
        return self.intern("phases", name)

    def tensor_number(self, tensor: torch.Tensor) -> int:
        """Returns the number of a tensor's shape, type and device."""
        sizes = () if tensor.is_nested else tensor.shape  # rows of a nested tensor have different sizes
        key = (tensor.dtype, sizes, tensor.device)
        number = self._tensors.get(key)
        if number is None:
            shape = "x".join(str(int(size)) for size in sizes)
            record = [shape, str(tensor.dtype).removeprefix("torch."), str(tensor.device)]
            number = self._tensors[key] = self.intern("tensors", tuple(record), record)
        return number

    def record(self, stream: str, record: Any) -> None:
        """Writes one record at once, after everything logged before it.

        Raises:
            OSError: The spool cannot be written.
        """
        self.flush()
        self._writer.write_record(stream, record)

    def flush(self) -> None:
        """Writes all buffered rows to the operating system.

        Raises:
            OSError: The spool cannot be written.
        """
        # Texts first: a recording truncated between two frames must not contain a number without its text.
        for stream, texts in self._fresh.items():
            if texts:
                self._writer.write_record(stream, texts)
                texts.clear()
        for stream in COLUMNS:
            rows: list[int] = getattr(self, stream)
            if rows:
                written = array("q", rows)
                self._writer.write_rows(stream, written)
                del rows[: len(written)]  # other threads, which free tensors, may have added some meanwhile
        self.flushed_ns = clock_ns()

    def sample_rss(self) -> None:
        """Logs the process's resident memory, if the system reports it."""
        try:
            with _open("/proc/self/statm", "rb") as statm:
                pages = int(statm.read().split()[1])
        except OSError as error:
            raise_if_of_job(error)
            return
        self.rss.extend((clock_ns(), self.op_count, pages * _PAGE_BYTES))

    def sample_heap(self, held_bytes: int = -1) -> bool:
        """Logs the sizes of the process's heaps if due: twice a second, and ever more rarely over a run.

        Args:
            held_bytes: Bytes of tensors and arrays in main memory, with which the sizes are logged in any case.

        Returns:
            Whether they were logged.
        """
        now = clock_ns()
        if held_bytes < 0 and now < self._next_heap_ns:
            return False
        self._next_heap_ns = now + max(_HEAP_NS, (now - self._began_ns) // _HEAP_SAMPLES)
        self.heap.extend((now, *heap_sizes(), sys.getallocatedblocks(), held_bytes))
        return True

    def add_fact(
        self, address: int, size_bytes: int, category: int, name: int = -1, module: int = -1, tensor: int = -1
    ) -> None:
        """Logs what the memory at an address is used for at this moment."""
        self.facts.extend((clock_ns(), address, size_bytes, category, name, module, tensor))

    def abort(self, fault: str) -> None:
        """Drops the buffered rows, writes the reason, and closes the file.

        Raises:
            OSError: Not even the reason could be written.
        """
        for stream in COLUMNS:
            getattr(self, stream).clear()
        try:
            try:
                self._writer.write_reason(fault)
            except OSError:  # on a full disk a line may still fit
                self._writer.write_reason(fault.strip().splitlines()[-1])
        finally:
            self._writer.close()

    def close(self, records: Iterable[tuple[str, Any]] = ()) -> None:
        """Flushes, writes the final records and closes the file."""
        for stream, record in records:
            self.record(stream, record)
        self.flush()
        self._writer.close()
