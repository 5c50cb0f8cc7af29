"""Carries storages to a file and back, in a thread of its own."""

from __future__ import annotations

import atexit
import ctypes
import os
import queue
import tempfile
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

#: Places in the file begin at multiples of this: the size of a page.
_PAGE = 4096


@dataclass
class _Ticket:
    """One copy under way: set when it is over, with what went wrong."""

    is_over: threading.Event = field(default_factory=threading.Event)
    error: OSError | None = None

    def wait(self) -> OSError | None:
        self.is_over.wait()
        return self.error


@dataclass
class _Place:
    """A stretch of the file and the copies to and from it."""

    offset: int
    size_bytes: int
    out: _Ticket = field(default_factory=_Ticket)
    back: _Ticket | None = None

    @property
    def is_quiet(self) -> bool:
        return self.out.is_over.is_set() and (self.back is None or self.back.is_over.is_set())


class Extents:
    """The stretches of a file in use: the smallest free one that fits is taken, neighbours are merged when free."""

    def __init__(self) -> None:
        """Nothing is in use."""
        self.end = 0
        self._free: dict[int, int] = {}  # size by offset

    def take(self, size: int) -> int:
        """Returns the offset of a free stretch of whole pages."""
        size = _pages(size)
        fitting = [(length, offset) for offset, length in self._free.items() if length >= size]
        if not fitting:
            offset, self.end = self.end, self.end + size
            return offset
        length, offset = min(fitting)
        del self._free[offset]
        if length > size:
            self._free[offset + size] = length - size
        return offset

    def give(self, offset: int, size: int) -> None:
        """Gives a stretch back."""
        size = _pages(size)
        size += self._free.pop(offset + size, 0)
        before = next((start for start, length in self._free.items() if start + length == offset), None)
        if before is not None:
            size += self._free.pop(before)
            offset = before
        if offset + size == self.end:
            self.end = offset
        else:
            self._free[offset] = size


class DiskCarrier:
    """Copies to a private file without a name, which is gone with the process however that ends.

    The thread touches addresses only, never tensors: memory is taken and given back by the thread that trains.

    Attributes:
        device: It moves from the memory of the processor.
    """

    device = "cpu"

    def __init__(self, folder: str) -> None:
        """Opens the file.

        Raises:
            OSError: There is no such folder, or nothing can be written there.
        """
        self._file = tempfile.TemporaryFile(buffering=0, dir=folder or None)  # noqa: SIM115  # open until close()
        self._extents = Extents()
        self._lock = threading.RLock()
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="memprof swap", daemon=True)
        self._has_failed = False
        self._is_closed = False
        self._thread.start()
        # Before the interpreter kills daemon threads: nobody may wait for a copy that never ends.
        atexit.register(self.close)

    def send(self, storage: torch.UntypedStorage) -> _Place:
        """Starts writing."""
        with self._lock:
            place = _Place(self._extents.take(storage.nbytes()), storage.nbytes())
        if self._has_failed or self._is_closed:
            place.out.error = OSError("not written")
            place.out.is_over.set()
        else:
            self._jobs.put((os.pwritev, storage.data_ptr(), place, place.out))
        return place

    def sent(self, place: _Place) -> bool:
        """Waits until it is written; where it cannot be, training goes on without and says so once."""
        error = place.out.wait()
        if error is not None and not (self._has_failed or self._is_closed):
            self._has_failed = True
            warnings.warn(f"swap: what is saved stays in memory from now on: {error}", RuntimeWarning, stacklevel=2)
        return error is None

    def fetch(self, place: _Place) -> torch.UntypedStorage:
        """Takes memory and starts reading.

        Raises:
            RuntimeError: The policy was taken back since.
        """
        if self._is_closed:
            raise RuntimeError("swap was taken back between forward and backward: what was on disk is gone")
        place.back = _Ticket()
        storage = torch.UntypedStorage(place.size_bytes)  # type: ignore[no-untyped-call]
        self._jobs.put((os.preadv, storage.data_ptr(), place, place.back))
        return storage

    def fetched(self, place: _Place) -> None:
        """Waits until it is read.

        Raises:
            OSError: The file cannot be read.
        """
        error = place.back.wait() if place.back is not None else None
        if error is not None:
            raise error

    def forget(self, place: _Place, storage: torch.UntypedStorage | None) -> None:
        """Waits for what is under way and gives the stretch back."""
        if threading.current_thread() is self._thread and not place.is_quiet:
            # The garbage collector can run in any thread; this one must not wait for itself.
            self._jobs.put((None, storage, place, None))
            return
        place.out.wait()
        if place.back is not None:
            place.back.wait()
        with self._lock:
            self._extents.give(place.offset, place.size_bytes)

    def close(self) -> None:
        """Ends the thread and closes the file."""
        if not self._is_closed:
            self._is_closed = True
            atexit.unregister(self.close)
            self._jobs.put(None)
            self._thread.join()
            self._file.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            copy, address, place, ticket = job
            if copy is None:
                self.forget(place, None)
            else:
                try:
                    _copy_all(copy, self._file.fileno(), address, place.size_bytes, place.offset)
                except OSError as error:
                    ticket.error = error
                ticket.is_over.set()
            del job, address, place, ticket


def is_in_memory(folder: str) -> bool:
    """Tells whether a folder's file system is itself in memory."""
    path = Path(folder or tempfile.gettempdir()).resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    return bool(mounts) and max(mounts, key=lambda part: len(part.mountpoint)).fstype in ("tmpfs", "ramfs")


def _copy_all(copy: Any, descriptor: int, address: int, size: int, offset: int) -> None:
    """Copies between memory and a file until all is done: one call may do less, and does at 2 GiB."""
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    done = 0
    while done < size:
        moved = copy(descriptor, [memory[done:]], offset + done)
        if moved == 0:
            raise OSError(f"the file ended {size - done} bytes early")
        done += moved


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
