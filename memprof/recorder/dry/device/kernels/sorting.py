"""What CUDA's sorts allocate beside their results, from torch's cuda/Sort.cpp and cuda/SortStable.cu (2.13).

Indices count as 8 bytes, keys as what they have: up to 4,096 elements are sorted in place, one row or rows of a million
and more by CUB's radix sort row by row, fewer than 128 rows all at once with the number of their row, and 128 or more
by CUB's segmented sort.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.recorder.dry.device.kernels.gradient_sums import is_dense
from memprof.recorder.dry.device.kernels.steps import aligned, sort_bytes

_INT64 = 8
#: Elements of a dimension that are sorted in place (cuda/Sort.h).
_SMALL = 4_096
#: Rows from which CUB sorts segments, and elements of a row from which each is sorted alone.
_SEGMENTS, _LONG = 128, 1_000_000
#: Elements that CUB counts at once.
_MOST = 2**31 - 1


def sort_sizes(args: Any, result: Any) -> list[int]:
    """Returns the bytes of what is alive at once while a tensor is sorted."""
    dim = next((one for one in args[1:] if type(one) is int), -1)
    return _sizes(args[0], dim, result[0])


def topk_sizes(args: Any, result: Any) -> list[int]:
    """More than 4,096 results of a row that have to be in order are sorted, with copies (cuda/TensorTopK.cpp)."""
    values, indices = result
    given = list(args[2:])
    dim, _, is_sorted = given + [-1, True, True][len(given) :]
    if not is_sorted or values.dim() == 0 or values.shape[dim] <= _SMALL:
        return []
    return [indices.nbytes, values.nbytes, *_sizes(values, dim, values)]


def median_sizes(args: Any, _result: Any) -> list[int]:
    """The median of all elements is that of them sorted (median_impl, cuda/Sorting.cpp)."""
    tensor, count = args[0], args[0].numel()
    copy = [] if tensor.is_contiguous() else [tensor.nbytes]
    return [*copy, tensor.nbytes, count * _INT64, *_row_sizes(count, count, tensor.element_size())]


def _sizes(tensor: torch.Tensor, dim: int, values: torch.Tensor) -> list[int]:
    """Returns the bytes of a sort's temporary memory.

    Args:
        tensor: What is sorted.
        dim: Along which dimension.
        values: The result.
    """
    count = tensor.numel()
    if tensor.dim() == 0 or not count:
        return []
    length = tensor.shape[dim]
    copies: list[int] = []
    if length > _SMALL and not (is_dense(tensor) and tensor.stride(dim) == 1):
        # Its rows do not lie one after another: they do in copies, and those of the results in copies of these.
        copies = [count * tensor.element_size(), *([] if values.stride(dim) == 1 else [values.nbytes, count * _INT64])]
    return [*copies, *_row_sizes(count, length, tensor.element_size())]


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
