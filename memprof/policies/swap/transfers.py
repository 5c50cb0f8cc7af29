"""Copies storages out of a device and back: to pinned host memory, or to a file."""

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

#: Alignment of extents in the file: the page size.
_PAGE = 4096


@dataclass
class _Pinned:
    """Pinned memory, and the copies to and from it.

    Attributes:
        host: The memory.
        sender: The stream that computed the sent data, and will reuse its memory.
        out: Event after which the copy out is complete.
        copying_to: The stream for which memory was allocated to copy back into.
        back: Event after which that copy is complete.
    """

    host: torch.Tensor
    sender: torch.cuda.Stream
    out: torch.cuda.Event
    copying_to: torch.cuda.Stream | None = None
    back: torch.cuda.Event | None = None


class HostCarrier:
    """Copies out on one stream and back on another, concurrent with the computing stream.

    The processor never waits: the computing stream waits for an event before memory is freed or read. The caching
    allocator may therefore reuse the memory at once, since all later work on it follows that event. The streams are
    recorded, because the last reference may be dropped in another stream.

    Attributes:
        device: The device it moves from, such as ``cuda:0``; storages on other devices stay.
    """

    def __init__(self, device: torch.device) -> None:
        """Creates the two streams of a device."""
        self.device = str(device)
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, storage: torch.UntypedStorage) -> _Pinned:
        """Starts the copy out, after all work enqueued so far."""
        sender = torch.cuda.current_stream(self._device)
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        # The job may have set a different default device.
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=True)
        self._out.wait_stream(sender)
        with torch.cuda.stream(self._out):
            host.copy_(source, non_blocking=True)
            out = self._out.record_event()
        return _Pinned(host, sender, out)

    def sent(self, place: _Pinned) -> bool:
        """Makes all later work, including on the freed memory, wait for the copy out."""
        place.sender.wait_event(place.out)
        return True

    def fetch(self, place: _Pinned) -> torch.UntypedStorage:
        """Allocates memory on the computing stream and starts the copy back once its previous owner is done with it."""
        place.copying_to = torch.cuda.current_stream(self._device)
        target = torch.empty(place.host.numel(), dtype=torch.uint8, device=self._device)
        self._back.wait_stream(place.copying_to)
        self._back.wait_event(place.out)
        with torch.cuda.stream(self._back):
            target.copy_(place.host, non_blocking=True)
            place.back = self._back.record_event()
        return target.untyped_storage()

    def fetched(self, place: _Pinned) -> None:
        """Makes all later work wait for the copy back."""
        if place.back is not None:
            torch.cuda.current_stream(self._device).wait_event(place.back)

    def forget(self, place: _Pinned, storage: torch.UntypedStorage | None) -> None:
        """Makes reuse of the memory wait for the copies; pinned memory's own allocator waits by itself."""
        place.sender.wait_event(place.out)
        if place.copying_to is not None and place.back is not None:
            place.copying_to.wait_event(place.back)

    def close(self) -> None:
        """Waits for all pending copies."""
        self._out.synchronize()
        self._back.synchronize()


@dataclass
class _Ticket:
    """One copy in progress: set when it completes, with its error if any."""

    is_over: threading.Event = field(default_factory=threading.Event)
    error: OSError | None = None

    def wait(self) -> OSError | None:
        self.is_over.wait()
        return self.error


@dataclass
class _Extent:
    """An extent of the file, and the copies to and from it."""

    offset: int
    size_bytes: int
    out: _Ticket = field(default_factory=_Ticket)
    back: _Ticket | None = None

    @property
    def is_quiet(self) -> bool:
        return self.out.is_over.is_set() and (self.back is None or self.back.is_over.is_set())


class Extents:
    """Allocator of the file's extents: takes the smallest free one that fits, and merges free neighbours."""

    def __init__(self) -> None:
        self.end = 0
        self._free: dict[int, int] = {}  # size by offset

    def take(self, size: int) -> int:
        """Returns the offset of a free extent of whole pages."""
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
        """Frees an extent."""
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
    """Copies to a private unnamed file, which disappears with the process however it ends.

    The thread uses raw addresses only, never tensors: the training thread allocates and frees memory.

    Attributes:
        device: Always the CPU: it moves from host memory.
    """

    device = "cpu"

    def __init__(self, folder: str) -> None:
        """Opens the file.

        Raises:
            OSError: The folder does not exist or is not writable.
        """
        self._file = tempfile.TemporaryFile(buffering=0, dir=folder or None)  # noqa: SIM115  # open until close()
        self._extents = Extents()
        self._lock = threading.RLock()
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="memprof swap", daemon=True)
        self._has_failed = False
        self._is_closed = False
        self._thread.start()
        # Runs before the interpreter kills daemon threads, so that nothing waits for a copy that never ends.
        atexit.register(self.close)

    def send(self, storage: torch.UntypedStorage) -> _Extent:
        """Starts the write."""
        with self._lock:
            place = _Extent(self._extents.take(storage.nbytes()), storage.nbytes())
        if self._has_failed or self._is_closed:
            place.out.error = OSError("not written")
            place.out.is_over.set()
        else:
            self._jobs.put((os.pwritev, storage.data_ptr(), place, place.out))
        return place

    def sent(self, place: _Extent) -> bool:
        """Waits for the write; if it fails, the tensor stays in memory and a warning is issued once."""
        error = place.out.wait()
        if error is not None and not (self._has_failed or self._is_closed):
            self._has_failed = True
            warnings.warn(f"swap: saved tensors stay in memory from now on: {error}", RuntimeWarning, stacklevel=2)
        return error is None

    def fetch(self, place: _Extent) -> torch.UntypedStorage:
        """Allocates memory and starts the read.

        Raises:
            RuntimeError: The policy has been undone since.
        """
        if self._is_closed:
            raise RuntimeError("swap was removed between forward and backward: the data on disk is gone")
        place.back = _Ticket()
        storage = torch.UntypedStorage(place.size_bytes)  # type: ignore[no-untyped-call]
        self._jobs.put((os.preadv, storage.data_ptr(), place, place.back))
        return storage

    def fetched(self, place: _Extent) -> None:
        """Waits for the read.

        Raises:
            OSError: The file cannot be read.
        """
        error = place.back.wait() if place.back is not None else None
        if error is not None:
            raise error

    def forget(self, place: _Extent, storage: torch.UntypedStorage | None) -> None:
        """Waits for pending copies and frees the extent."""
        if threading.current_thread() is self._thread and not place.is_quiet:
            # The garbage collector can run in any thread, including this one, which must not wait for itself.
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
    """Returns whether a folder's file system is known to be itself in memory."""
    path = Path(folder or tempfile.gettempdir()).resolve()
    try:
        mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    except OSError:
        return False  # unknown without /proc
    return bool(mounts) and max(mounts, key=lambda part: len(part.mountpoint)).fstype in ("tmpfs", "ramfs")


def _copy_all(copy: Any, descriptor: int, address: int, size: int, offset: int) -> None:
    """Copies between memory and a file until complete: a single call may copy less, and does at 2 GiB."""
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    done = 0
    while done < size:
        moved = copy(descriptor, [memory[done:]], offset + done)
        if moved == 0:
            raise OSError(f"the file ended {size - done} bytes early")
        done += moved


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
