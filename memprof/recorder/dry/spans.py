"""Returns stand-ins for a tensor's address: a fake storage is identified by torch's own key for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.recorder.memory.inventory import owned_span, storage_span

#: Attribute of a fake storage that represents a mapped file, not memory of torch's allocator.
_MAPPED = "_memprof_mapped"


def mapped(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a fake tensor over a mapped file, whose storage is not counted as memory of torch's allocator.

    Args:
        size: Its size.
        stride: Its strides.
        dtype: Its type.
    """
    places = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if 0 not in size else 0
    storage = torch.UntypedStorage(places * dtype.itemsize, device="meta")  # type: ignore[no-untyped-call]
    setattr(storage, _MAPPED, True)
    return torch.empty((0,), dtype=dtype).set_(storage, 0, tuple(size), tuple(stride))


def dry_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns a number unique among live storages in place of the address, and the tensor's own bytes."""
    if isinstance(tensor, FakeTensor):
        return _of_fake(tensor)[0], tensor.nbytes
    return storage_span(tensor)[0], tensor.nbytes


def dry_storage_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns that number and the bytes of a tensor's storage; (0, 0) for tensors without one."""
    return _of_fake(tensor) if isinstance(tensor, FakeTensor) else storage_span(tensor)


def dry_owned_span(tensor: torch.Tensor) -> tuple[int, int]:
    """The same for a storage that torch's allocator would own."""
    if not isinstance(tensor, FakeTensor):
        return owned_span(tensor)
    number, size = _of_fake(tensor)
    return (number, size) if size and not hasattr(tensor.untyped_storage(), _MAPPED) else (0, 0)


def _of_fake(tensor: torch.Tensor) -> tuple[int, int]:
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return 0, 0  # sparse and opaque tensors
    return storage._cdata, storage.nbytes()
