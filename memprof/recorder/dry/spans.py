"""Says where the memory of a tensor would be: a storage without memory is known by what torch knows it by."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.recorder.inventory import owned_span, storage_span


def dry_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns a number that no other storage alive has, in place of the address, and the tensor's own bytes."""
    if isinstance(tensor, FakeTensor):
        return _of_fake(tensor)[0], tensor.nbytes
    return storage_span(tensor)[0], tensor.nbytes


def dry_storage_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns that number and the bytes of a tensor's storage; (0, 0) for tensors without one."""
    return _of_fake(tensor) if isinstance(tensor, FakeTensor) else storage_span(tensor)


def dry_owned_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the same of a storage that torch's allocator would own."""
    if not isinstance(tensor, FakeTensor):
        return owned_span(tensor)
    number, size = _of_fake(tensor)
    return (number, size) if size else (0, 0)


def _of_fake(tensor: torch.Tensor) -> tuple[int, int]:
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return 0, 0  # sparse and opaque tensors
    return storage._cdata, storage.nbytes()
