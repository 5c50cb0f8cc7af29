"""Reads the CPU allocator's own count of allocated bytes directly from memory, in a tenth of a microsecond.

torch counts the bytes of its CPU allocator in all threads once `AllocatorTable` is enabled, and reports the count
with each event to a profiler; no API returns it. The counter is a field of an object whose address the library
exports (`c10::profiledCPUMemoryReporter`). The field is found by trial: two allocations of odd sizes must change it
by exactly these sizes, and no other field.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from memprof.recorder.profiler.torch_library import open_library

_LIBRARIES = ("libc10.so", "libc10.dylib")
_ENTRY = "_ZN3c1025profiledCPUMemoryReporterEv"
_WORDS = 20
_TRIALS = (1_234_567, 765_431)
_TRIES = 3

_Storage: Any = torch.UntypedStorage  # not annotated in torch


class AllocatorCount:
    """The count, once found.

    Attributes:
        word: The counter itself, None before it is found.
    """

    def __init__(self) -> None:
        """Starts without a counter."""
        self.word: ctypes.c_size_t | None = None

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
