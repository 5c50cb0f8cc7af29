"""Fake tensors of a dry run: stand-ins for their addresses, and sparse ones that hold their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memprof.recorder.memory.tensor_memory import PARTS, outside_span, owned_span, parts_of, storage_span
from memprof.virtual.values.known import known, note

#: Attribute of a fake storage that represents a mapped file, not memory of torch's allocator.
_MAPPED = "_memprof_mapped"
#: Attribute of a real storage that holds what a dry run computed for itself.
_INTERNAL = "_memprof_internal"
_PATTERN = "_memprof_pattern"


def internal(tensor: torch.Tensor) -> torch.Tensor:
    """Marks a tensor with data as the dry run's own, which is not counted as memory of the job; returns it."""
    setattr(tensor.untyped_storage(), _INTERNAL, True)
    return tensor


def mapped(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a fake tensor over a mapped file, whose storage is not counted as memory of torch's allocator."""
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


@dataclass(frozen=True, eq=False)
class Pattern:
    """Where the elements of a sparse tensor are.

    Attributes:
        indices: Its index tensors, on the processor and with values: one of COO, two of compressed layouts.
        is_certain: Whether they are those of a real run; otherwise as many elements as possible differ.
        is_coalesced: Whether torch takes them to be sorted and unique; always in compressed layouts.
    """

    indices: tuple[torch.Tensor, ...]
    is_certain: bool = True
    is_coalesced: bool = False

    def __deepcopy__(self, memo: Any) -> Pattern:
        """Returns itself: copies share what is never written to."""
        return self


def is_sparse(value: Any) -> bool:
    """Whether a value is a tensor of a sparse layout."""
    return isinstance(value, torch.Tensor) and value.layout in _LAYOUTS


def pattern_of(tensor: torch.Tensor) -> Pattern:
    """Returns the pattern of a sparse tensor, fake or with data."""
    kept: Pattern | None = getattr(tensor, _PATTERN, None)
    return Pattern(parts_of(tensor)[:-1], is_coalesced=is_coalesced(tensor)) if kept is None else kept


def is_coalesced(tensor: torch.Tensor) -> bool:
    """Whether torch takes the elements of a sparse tensor with data, or without memory, to be sorted and unique."""
    unseen: Any = torch._C._DisableTorchDispatch()
    with unseen:
        return tensor.layout is not torch.sparse_coo or tensor.is_coalesced()


def count_places(tensor: torch.Tensor) -> int:
    """Returns how many places of a COO tensor's sparse dimensions are stored, each counted once."""
    indices = pattern_of(tensor).indices[0]
    sizes, ones = tuple(tensor.shape[: indices.shape[0]]), torch.ones(indices.shape[1])
    return torch.sparse_coo_tensor(indices, ones, sizes, check_invariants=False).coalesce()._nnz()


def values_of(indices: torch.Tensor) -> torch.Tensor | None:
    """Returns the values of indices, with data of any size or fake; None where they are not known."""
    return known(indices) if isinstance(indices, FakeTensor) else indices


def spread_pattern(sizes: tuple[int, ...], count: int, *, is_coalesced: bool = False) -> Pattern:
    """Returns a pattern whose elements differ as far as their number allows.

    Args:
        sizes: The sparse dimensions.
        count: Number of elements.
        is_coalesced: As in `Pattern`.
    """
    places = torch.Size(sizes).numel()
    flat = torch.arange(count) % max(places, 1)
    rows = torch.unravel_index(flat, sizes) if sizes else ()
    indices = torch.stack(rows) if sizes else torch.empty((0, count), dtype=torch.int64)
    return Pattern((internal(indices),), is_certain=False, is_coalesced=is_coalesced)


def make(
    mode: FakeTensorMode,
    layout: torch.layout,
    size: tuple[int, ...],
    parts: tuple[torch.Tensor, ...],
    pattern: Pattern,
    device: torch.device,
) -> FakeTensor:
    """Returns a sparse fake tensor.

    Args:
        mode: The dry run's mode.
        layout: Its layout.
        size: Its size.
        parts: The plain tensors that hold its memory, values last; they may have data.
        pattern: Its pattern.
        device: Its device.
    """
    unseen: Any = torch._C._DisableTorchDispatch()
    create: Any = torch.sparse_compressed_tensor
    settings: dict[str, Any] = {"layout": layout}
    if layout is torch.sparse_coo:
        create, settings = torch.sparse_coo_tensor, {"is_coalesced": pattern.is_coalesced}
    with unseen:
        empty = [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in parts]
        shell = create(*empty, size, check_invariants=False, device="meta", **settings)
    return share(FakeTensor(mode, shell, device), parts, pattern)


def share(tensor: FakeTensor, parts: tuple[torch.Tensor, ...], pattern: Pattern) -> FakeTensor:
    """Gives a sparse fake tensor the plain tensors that hold its memory, and its pattern; returns it."""
    setattr(tensor, PARTS, parts)
    setattr(tensor, _PATTERN, pattern)
    return tensor


def replace(tensor: FakeTensor, made: FakeTensor) -> None:
    """Gives a sparse fake tensor the memory and pattern of a new one, as operators do that write to it."""
    tensor.data = made
    share(tensor, parts_of(made), pattern_of(made))


def part(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """Returns an alias of a part of a sparse fake tensor, with the values of indices if they are certain."""
    parts, pattern = parts_of(tensor), pattern_of(tensor)
    found = parts[place].detach()
    if pattern.is_certain and 0 <= place < len(pattern.indices) and isinstance(found, FakeTensor):
        note(found, pattern.indices[place])
    return found


_LAYOUTS = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
