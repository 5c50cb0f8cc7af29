"""Returns stand-ins for a tensor's address: a fake storage is identified by torch's own key for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memprof.recorder.memory.inventory import owned_span, storage_span

#: Attribute of a fake storage that represents a mapped file, not memory of torch's allocator.
_MAPPED = "_memprof_mapped"
#: Attribute of a real storage of torch's allocator that is fixed in size: numpy shares it, or `torch.load` filled it.
_LENT = "_memprof_lent"
#: Attribute of a real storage that holds what a dry run computed for itself.
_INTERNAL = "_memprof_internal"


def internal(tensor: torch.Tensor) -> torch.Tensor:
    """Marks a tensor with data as the dry run's own, which is not counted as memory of the job; returns it."""
    setattr(tensor.untyped_storage(), _INTERNAL, True)
    return tensor


def own(storage: torch.UntypedStorage) -> None:
    """Marks a storage that `torch.load` reads as memory of torch's allocator, though its size is fixed."""
    setattr(storage, _LENT, True)


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
        if _is_marked(tensor, _INTERNAL):
            return 0, 0
        is_lent = _is_marked(tensor, _LENT) and not tensor.untyped_storage().is_shared()
        return storage_span(tensor) if is_lent else owned_span(tensor)
    if type(tensor.fake_mode) is FakeTensorMode:
        return 0, 0  # of torch's compiler, or the job's own: it has no memory in a real run
    number, size = _of_fake(tensor)
    return (number, size) if size and not hasattr(tensor.untyped_storage(), _MAPPED) else (0, 0)


def mark_lent() -> None:
    """Marks from now on the storages that ``Tensor.numpy`` shares.

    torch makes them fixed in size, like those over foreign memory, so that they could not be distinguished afterwards
    (``tensor_to_numpy`` in torch/csrc/utils/tensor_numpy.cpp). A data set that converts its items is an example.
    """
    tensors: Any = torch.Tensor
    original = tensors.numpy

    @wraps(original)
    def numpy(tensor: Any, **settings: Any) -> Any:
        if owned_span(tensor)[0]:
            setattr(tensor.untyped_storage(), _LENT, True)
        return original(tensor, **settings)

    tensors.numpy = numpy


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
