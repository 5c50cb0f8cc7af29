"""Asks the C library how large its heap is, in use and free."""

from __future__ import annotations

import ctypes
from typing import Any

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
