"""What CUDA's sorts allocate beside their results, from torch's cuda/Sort.cpp and cuda/SortStable.cu (2.13).

Indices count as 8 bytes, keys as what they have: up to 4,096 elements are sorted in place, one row or rows of a million
and more by CUB's radix sort row by row, fewer than 128 rows all at once with the number of their row, and 128 or more
by CUB's segmented sort.
"""

from __future__ import annotations

from typing import Any

from memprof.recorder.dry.device.kernels.steps import aligned, sort_bytes
from memprof.recorder.steps.usages import dense_layout

#: Elements of a dimension that are sorted in place (cuda/Sort.h).
_SMALL = 4_096
#: Rows from which CUB sorts segments, and elements of a row from which each is sorted alone.
_SEGMENTS, _LONG = 128, 1_000_000
#: Elements that CUB counts at once.
_MOST = 2**31 - 1


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
