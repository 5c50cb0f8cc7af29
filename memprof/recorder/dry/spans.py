"""Returns stand-ins for a tensor's address: a fake storage is identified by torch's own key for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memprof.recorder.memory.tensor_memory import outside_span, owned_span, storage_span

#: Attribute of a fake storage that represents a mapped file, not memory of torch's allocator.
_MAPPED = "_memprof_mapped"
#: Attribute of a real storage that holds what a dry run computed for itself.
_INTERNAL = "_memprof_internal"


def internal(tensor: torch.Tensor) -> torch.Tensor:
    """Marks a tensor with data as the dry run's own, which is not counted as memory of the job; returns it."""
    setattr(tensor.untyped_storage(), _INTERNAL, True)
    return tensor


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
    """Returns a number unique among live storages in place of the address, and the tensor's own bytes.

    (0, 0) for tensors without a storage of their own: sparse and opaque ones.
    """
    if tensor.layout is not torch.strided:
        return 0, 0
    if isinstance(tensor, FakeTensor):
        return _of_fake(tensor)[0], tensor.nbytes
    return storage_span(tensor)[0], tensor.nbytes


def dry_storage_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns that number and the bytes of a tensor's storage; (0, 0) for tensors without one."""
    return _of_fake(tensor) if isinstance(tensor, FakeTensor) else storage_span(tensor)


def dry_owned_span(tensor: torch.Tensor) -> tuple[int, int]:
    """The same for a storage that torch's allocator would own."""
    if not isinstance(tensor, FakeTensor):
        return (0, 0) if _is_marked(tensor, _INTERNAL) else owned_span(tensor)
    return _of_job(tensor, is_mapped=False)


def dry_outside_span(tensor: torch.Tensor) -> tuple[int, int]:
    """The same for a storage in main memory that it would not own."""
    return _of_job(tensor, is_mapped=True) if isinstance(tensor, FakeTensor) else outside_span(tensor)


def _of_job(tensor: FakeTensor, *, is_mapped: bool) -> tuple[int, int]:
    if type(tensor.fake_mode) is FakeTensorMode:
        return 0, 0  # of torch's compiler, or the job's own: it has no memory in a real run
    number, size = _of_fake(tensor)
    return (number, size) if size and hasattr(tensor.untyped_storage(), _MAPPED) is is_mapped else (0, 0)


def _is_marked(tensor: torch.Tensor, mark: str) -> bool:
    try:
        return hasattr(tensor.untyped_storage(), mark)
    except (NotImplementedError, RuntimeError):
        return False  # sparse and opaque tensors, and those of torch.func's transforms


def _of_fake(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.device.type == "meta":
        return 0, 0  # the job's own, or a view through which torch copies a storage: it has no memory in a real run
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return 0, 0  # sparse and opaque tensors
    return storage._cdata, storage.nbytes()
