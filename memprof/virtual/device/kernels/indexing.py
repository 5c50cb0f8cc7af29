"""What CUDA's kernels of indexed operators and sorts allocate beside their results.

Source: aten/src/ATen/native/TensorAdvancedIndexing.cpp, cuda/Nonzero.cu and cuda/Indexing.cu of torch 2.11. CUB's sizes
are those of snapshots of an H200 under CUDA 13, and of an RTX 4090 where so stated.

Indices count as 8 bytes, keys as what they have: up to 4,096 elements are sorted in place, one row or rows of a million
and more by CUB's radix sort row by row, fewer than 128 rows all at once with the number of their row, and 128 or more
by CUB's segmented sort.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from memprof.recorder.calls.read_values import MASKS, kept_elements
from memprof.recorder.steps.usages import dense_layout
from memprof.virtual.device.face import is_on_device
from memprof.virtual.device.kernels.steps import aligned, scan_bytes, sort_bytes, states_bytes
from memprof.virtual.device.memory import FREE, FREE_BELOW, RESULTS, copied_steps

_aten = torch.ops.aten
_INT32, _INT64 = 4, 8
#: Elements that CUB counts in one tile; above, each of its blocks of so many threads has a partial count, five times as
#: many blocks as run at once.
_COUNTED, _COUNTING_THREADS, _SUBSCRIPTION = 4_096, 256, 5
#: Elements per tile of a selection (6,794 to 9,058 by snapshots).
_SELECTED = 8_192
#: Pairs that CUB sorts in one tile, and pairs per tile where it takes several (RTX 4090).
_TILE, _PART = 2_304, 1_920
#: Elements of a dimension that are sorted in place (cuda/Sort.h).
_SMALL = 4_096
#: Rows from which CUB sorts segments, and elements of a row from which each is sorted alone.
_SEGMENTS, _LONG = 128, 1_000_000
#: Elements that CUB counts at once.
_MOST = 2**31 - 1


class Indexing:
    """Kernels of operators with indices and masks on a device."""

    def __init__(self, multiprocessors: int, threads: int) -> None:
        """Takes what a device runs at once.

        Args:
            multiprocessors: Number of the device's multiprocessors.
            threads: Threads that each runs at once.
        """
        blocks = multiprocessors * (threads // _COUNTING_THREADS) * _SUBSCRIPTION
        self._partial_counts = aligned(blocks * _INT32)
        self._steps: dict[Any, Callable[[Any, Any], list[int]]] = {
            _aten.index: self._index,
            _aten.index_put: self._index_put,
            _aten.index_put_: self._index_put,
            _aten._index_put_impl_: self._index_put,
            _aten.masked_scatter: self._masked_scatter,
            _aten.masked_scatter_: self._masked_scatter,
            _aten.masked_scatter_backward: self._masked_scatter_backward,
            _aten.masked_select: self._masked_select,
            _aten.nonzero: self._nonzero,
        }

    def steps_of(self, func: Any, args: Any, result: Any) -> list[int] | None:
        """Returns bytes to allocate, FREE, FREE_BELOW and RESULTS in a kernel's order; None for other operators."""
        steps = self._steps.get(getattr(func, "overloadpacket", None))
        return None if steps is None else steps(args, result)

    def _nonzero(self, args: Any, _result: Any) -> list[int]:
        """Elements are counted, then their positions are selected."""
        mask = args[0]
        if not mask.numel():
            return [RESULTS]
        return [*copied_steps(mask), _INT32, self._counts(mask), FREE, RESULTS, _selection(mask)]

    def _masked_select(self, args: Any, result: Any) -> list[int]:
        """The mask is expanded to the shape of both."""
        mask = torch.broadcast_tensors(*args[:2])[1]  # type: ignore[no-untyped-call]
        return [*self._positions(mask, result.numel()), RESULTS]

    def _index(self, args: Any, result: Any) -> list[int]:
        indices = _given(args[1])
        count = result.numel() // max(kept_elements(args[0], args[1]), 1)
        return [*self._of_masks(indices, count), *_copies(indices), RESULTS]

    def _index_put(self, args: Any, _result: Any) -> list[int]:
        """Where values are accumulated, each index is multiplied by its stride and added; the sums are sorted."""
        tensor, indices, values = args[0], _given(args[1]), args[2]
        kept = max(kept_elements(tensor, args[1]), 1)
        masks = [index for index in indices if index.dtype in MASKS]
        count = values.numel() // kept if masks else math.prod(_broadcast(indices))
        if masks and values.numel() < kept:  # one value, or one row, for all that the mask selects
            count = max(mask.numel() for mask in masks)
        steps = [RESULTS, *self._of_masks(indices, count)]
        if not (len(args) > 3 and bool(args[3])):
            return [*steps, *_copies(indices)]
        if not count:
            return steps  # as of experts without tokens: nothing is sorted
        size = _INT64 * count
        more = len(indices) - len(masks) + sum(mask.dim() for mask in masks) - 1
        steps += [size, size, FREE_BELOW, *[size, size, FREE_BELOW, FREE] * more, *[FREE_BELOW] * len(masks)]
        return [*steps, *copied_steps(values), size, size, size, _sort_pairs(count, tensor.numel() // kept)]

    def _masked_scatter(self, args: Any, _result: Any) -> list[int]:
        """Elements of the mask are counted up to each (cuda/IndexKernel.cpp)."""
        mask = args[1]
        return [RESULTS, _INT64 * mask.numel(), scan_bytes(mask.numel())]

    def _masked_scatter_backward(self, args: Any, result: Any) -> list[int]:
        mask = args[1]
        return [*self._positions(mask, min(result.numel(), mask.numel())), RESULTS]

    def _of_masks(self, indices: list[torch.Tensor], count: int) -> list[int]:
        """Masks become the positions that they select."""
        masks = [index for index in indices if index.dtype in MASKS]
        return [step for mask in masks for step in self._positions(mask, count)]

    def _positions(self, mask: torch.Tensor, count: int) -> list[int]:
        """A mask that is not contiguous is copied first (nonzero_cuda_out_impl, cuda/Nonzero.cu)."""
        positions = count * mask.dim() * _INT64
        if not (positions and mask.numel()):
            return []
        copy = copied_steps(mask)
        counted = [*copy, _INT32, self._counts(mask), FREE]
        return [*counted, positions, _selection(mask), FREE, FREE_BELOW, *[FREE_BELOW] * len(copy)]

    def _counts(self, mask: torch.Tensor) -> int:
        return 1 if mask.numel() <= _COUNTED else self._partial_counts


def _broadcast(indices: list[torch.Tensor]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*(index.shape for index in indices)))  # type: ignore[no-untyped-call]


def _given(indices: Any) -> list[torch.Tensor]:
    return [index for index in indices if index is not None]


def _copies(indices: list[torch.Tensor]) -> list[int]:
    """Returns the bytes of copies of indices: those of the processor, and all unless their strides are the same.

    Positions in masks are not copied.
    """
    if any(index.dtype in MASKS for index in indices):
        return []
    shape = _broadcast(indices)
    rows = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    sizes = [math.prod(shape) * index.element_size() for index in indices]
    moved = [not is_on_device(index) for index in indices]
    strides = [rows if is_moved else _expanded(index, shape) for index, is_moved in zip(indices, moved, strict=True)]
    copies = [size for size, is_moved in zip(sizes, moved, strict=True) if is_moved]
    if len(set(strides)) > 1:
        copies += [size for size, held in zip(sizes, strides, strict=True) if not _are_rows(shape, held, rows)]
    return copies


def _expanded(tensor: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a tensor that is expanded to a shape (inferExpandGeometry, ExpandUtils.cpp)."""
    sizes, strides = [1] * (len(shape) - tensor.dim()) + list(tensor.shape), list(tensor.stride())
    for place in reversed(range(len(shape) - tensor.dim())):
        following = shape[place + 1] * strides[0] if strides else 1
        strides.insert(0, following)
    return tuple(stride if size == wide else 0 for size, wide, stride in zip(sizes, shape, strides, strict=True))


def _are_rows(shape: tuple[int, ...], strides: tuple[int, ...], rows: tuple[int, ...]) -> bool:
    """Whether strides are those of a contiguous tensor, but for dimensions of one element."""
    return all(size == 1 or one == row for size, one, row in zip(shape, strides, rows, strict=True))


def _selection(mask: torch.Tensor) -> int:
    """Returns the bytes in which CUB selects the positions of a mask."""
    return aligned(states_bytes(mask.numel(), _SELECTED))


def _sort_pairs(count: int, largest: int) -> int:
    """Returns the bytes in which CUB sorts pairs of 8 bytes: of more than one tile, a second copy and histograms.

    The sizes of tiles follow from snapshots of an RTX 4090 (8,192 pairs take 138,752 bytes, few take one block).
    """
    if count <= _TILE:
        return 1
    passes = -(-max(largest - 1, 1).bit_length() // 8)
    tables = 1024 * passes + 1024 * -(-count // _PART) + 511
    return 2 * _INT64 * count + tables


def sort_sizes(args: Any, result: Any) -> list[int]:
    """Returns the bytes of what is alive at once while a tensor is sorted."""
    tensor, values = args[0], result[0]
    dim = next((one for one in args[1:] if type(one) is int), -1)
    count, key = tensor.numel(), tensor.element_size()
    if tensor.dim() == 0 or not count:
        return []
    copies: list[int] = []
    if tensor.shape[dim] > _SMALL and (dense_layout(tensor) is None or tensor.stride(dim) != 1):
        # Its rows do not lie one after another: they do in copies, and those of the results in copies of these.
        copies = [count * key, *([] if values.stride(dim) == 1 else [values.nbytes, count * _INT64])]
    return [*copies, *_row_sizes(count, tensor.shape[dim], key)]


def topk_sizes(args: Any, result: Any) -> list[int]:
    """More than 4,096 results of a row that have to be in order are sorted, with copies (cuda/TensorTopK.cpp)."""
    values, indices = result
    given = list(args[2:])
    dim, _, is_sorted = given + [-1, True, True][len(given) :]
    if not is_sorted or values.dim() == 0 or values.shape[dim] <= _SMALL:
        return []
    return [indices.nbytes, values.nbytes, *sort_sizes((values, dim), result)]


def median_sizes(args: Any, _result: Any) -> list[int]:
    """The median of all elements is that of them sorted (median_impl, cuda/Sorting.cpp)."""
    tensor, count = args[0], args[0].numel()
    copy = [] if tensor.is_contiguous() else [tensor.nbytes]
    return [*copy, tensor.nbytes, count * _INT64, *_row_sizes(count, count, tensor.element_size())]


def _row_sizes(count: int, length: int, key: int) -> list[int]:
    """Returns the bytes of the kernels that sort rows, each of which lies together.

    Args:
        count: Elements of all rows.
        length: Elements of a row.
        key: Bytes of an element.
    """
    if length <= _SMALL:
        return [length * _INT64] if length else []  # positions in a row, which are copied to each
    count = min(count, _MOST // length * length)
    if count == length or length >= _LONG:
        return [length * _INT64, sort_bytes(length, key, _INT64)]
    if count // length < _SEGMENTS:
        return [count * _INT64, count * _INT64, count * key, sort_bytes(count, key, _INT64)]
    return [count * _INT64, -(-count * key // 256) * 256 + aligned(count * _INT64)]
