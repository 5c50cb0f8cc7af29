"""Returns address and bytes of a tensor's storage, by whose memory it is: torch's allocator's or another's.

Storages of other memory (numpy, mapped files, shared memory) cannot be resized, but not only they: `torch.load` and
``Tensor.numpy`` fix the size of the allocator's own. What frees a storage's memory distinguishes them: its pointer's
deleter, which no API returns. It is read from the storage itself, at the place that a storage just allocated shows.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from memprof.recorder.memory.parts import PLAIN

_WORDS = 8
_Storage: Any = torch.UntypedStorage  # not annotated in torch


def storage_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns address and bytes of a tensor's storage; (0, 0) for tensors without one (sparse, meta, opaque, fake)."""
    try:
        storage = tensor.untyped_storage()
        # A FakeTensor (during compilation) reports another device; its storage is "meta", and data_ptr would warn.
        is_meta = tensor.is_meta if type(tensor) in PLAIN else storage.device.type == "meta"
        return (0, 0) if is_meta else (storage.data_ptr(), storage.nbytes())
    except (NotImplementedError, RuntimeError):
        return 0, 0


def owned_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the span of a storage owned by torch's allocator; (0, 0) for memory of numpy, shared or mapped files."""
    return _span_of(tensor, is_owned=True)


def outside_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the span of a storage in main memory that torch's allocator does not own; (0, 0) for its own."""
    return _span_of(tensor, is_owned=False)


def _span_of(tensor: torch.Tensor, *, is_owned: bool) -> tuple[int, int]:
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta" or not storage.nbytes():
            return 0, 0
        return (storage.data_ptr(), storage.nbytes()) if _is_owned(storage) is is_owned else (0, 0)
    except (NotImplementedError, RuntimeError):
        return 0, 0


def _is_owned(storage: Any) -> bool:
    if storage.device.type != "cpu":
        return bool(storage.resizable())
    if storage.resizable():
        return not storage.is_shared()
    found = _deleter()
    return found is not None and _word(storage, found[0]) == found[1]


@cache
def _deleter() -> tuple[int, int] | None:
    """Returns the place of the deleter in a storage, in words, and that of torch's allocator; None if not found.

    The pointer to the memory, its deleter and the argument of this, again the pointer, follow each other (c10/core/
    StorageImpl.h, c10/util/UniqueVoidPtr.h).
    """
    trials = [_Storage(64), _Storage(64)]  # not operators, which a mode of the job's would see
    found = [
        {
            (place, _word(one, place))
            for place in range(1, _WORDS - 1)
            if _word(one, place - 1) == one.data_ptr() == _word(one, place + 1)
        }
        for one in trials
    ]
    return next(iter(found[0] & found[1]), None)


def _word(storage: Any, place: int) -> int:
    return ctypes.c_size_t.from_address(storage._cdata + ctypes.sizeof(ctypes.c_size_t) * place).value
