"""Temporary memory of CUDA reductions that are divided among several blocks.

Partial results go to a buffer, and a counter per output block says which block comes last (``gpu_reduce_kernel`` and
``setReduceConfig``, aten/src/ATen/native/cuda/Reduce.cuh; the order of dimensions, aten/src/ATen/TensorIterator.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memprof.recorder.calls.torch_state import packets

_aten = torch.ops.aten
_WARP = 32
_MOST_THREADS = 512
_VECTOR = 4
_LEAST_VALUES, _MOST_VALUES = 16, 256
_COUNTER_BYTES = 4
#: Above this many bytes torch divides the tensor first, so that indices fit into 32 bits.
_MOST_INDEXED = 2**31
#: Reductions, and bytes of one partial result; 0 for the type in which torch adds.
_PARTIAL: dict[Any, int] = {
    **dict.fromkeys((_aten.sum, _aten.mean, _aten.linalg_vector_norm, _aten.nansum, _aten.prod, _aten.norm), 0),
    **dict.fromkeys((_aten.amax, _aten.amin), 0),
    **dict.fromkeys((_aten.max, _aten.min), 0),
    **dict.fromkeys((_aten.argmax, _aten.argmin, _aten.var, _aten.std, _aten.var_mean, _aten.std_mean), 16),
    **dict.fromkeys((_aten.any, _aten.all), 1),
}
#: These return indices beside values if they reduce a dimension: a pair for each partial result.
_WITH_INDEX = _EXTREMA = (_aten.max, _aten.min)
#: Norms, whose order, perhaps an integer, stands before the dimensions.
_NORMS = (_aten.norm, _aten.linalg_vector_norm)
#: Reductions that read one value at a time.
_PLAIN = (_aten.var, _aten.std, _aten.var_mean, _aten.std_mean)
#: Operators that cast what they add up or multiply.
_SCANS = packets("cumsum cumprod")
_CASTING = packets("sum mean nansum prod") | _SCANS
_WIDE = {torch.float16: 4, torch.bfloat16: 4, torch.bool: 8, torch.uint8: 8, torch.int8: 8, torch.int16: 8}


def is_reduction(packet: Any) -> bool:
    """Whether an operator is a reduction that may take such memory."""
    return packet in _PARTIAL


def copied_bytes(packet: Any, args: Any, result: Any) -> int:
    """Returns the bytes of a reduction's or scan's input in another type or layout, in which the kernel reads it.

    Sums and products are cast to the type of their result, unless it is the wider type in which a kernel adds halves
    (make_reduction_from_out_ty, aten/src/ATen/native/ReduceOpsUtils.h); scans are cast in any case (impl_func_cum_ops,
    ReduceOps.cpp). The extremum of a whole tensor is found in one that is contiguous (ReduceAllOps.cpp).
    """
    tensor = args[0]
    if packet in _EXTREMA and len(args) == 1:
        return 0 if tensor.is_contiguous() else tensor.numel() * int(tensor.element_size())
    if packet not in _CASTING or tensor.dtype is result.dtype:
        return 0
    is_widened = tensor.dtype in (torch.float16, torch.bfloat16) and result.dtype is torch.float32
    return 0 if is_widened and packet not in _SCANS else tensor.numel() * int(result.element_size())


def reduction_sizes(packet: Any, args: Any, result: Any, multiprocessors: int, threads: int) -> list[int]:
    """Returns the bytes of the buffer and of the counters of a reduction; nothing where one block reduces."""
    tensor = args[0]
    first = result[0] if isinstance(result, (tuple, list)) else result
    if not isinstance(tensor, torch.Tensor) or not isinstance(first, torch.Tensor) or tensor.numel() == 0:
        return []
    if packet in _WITH_INDEX and len(args) > 1 and isinstance(args[1], torch.Tensor):
        return []  # of two tensors
    size = _PARTIAL[packet] or _WIDE.get(tensor.dtype, tensor.element_size())
    if packet in _WITH_INDEX and isinstance(result, (tuple, list)):
        size = 16
    outputs = first.numel()
    if outputs == tensor.numel() or tensor.numel() * tensor.element_size() > _MOST_INDEXED:
        return []
    reduced, kept = _dimensions(tensor, args[2:] if packet in _NORMS else args[1:])
    grid = _divide(
        reduced,
        kept,
        outputs,
        tensor.numel() // outputs,
        int(tensor.storage_offset()),
        packet,
        multiprocessors,
        threads,
    )
    if grid.per_output <= 1:
        return []
    return [size * outputs * grid.per_output * grid.width, _COUNTER_BYTES * grid.blocks]


@dataclass(frozen=True)
class _Grid:
    """How a reduction is divided.

    Attributes:
        blocks: Blocks over the outputs.
        per_output: Blocks that share an output.
        width: Partial results that each keeps per output.
    """

    blocks: int
    per_output: int
    width: int


def _divide(
    reduced: list[tuple[int, int]],
    kept: list[tuple[int, int]],
    outputs: int,
    inputs: int,
    offset: int,
    packet: Any,
    multiprocessors: int,
    threads: int,
) -> _Grid:
    is_inner = not kept or reduced[0][1] < kept[0][1]
    along, across = (inputs, outputs) if is_inner else (outputs, inputs)
    fastest = reduced[0][1] if is_inner else kept[0][1]
    vector = 1
    if fastest == 1:
        if is_inner and along > 128 and not kept and len(reduced) == 1 and packet not in _PLAIN:
            along //= _VECTOR
        elif not is_inner:
            vector = _VECTOR
            others = [stride for _, stride in (*reduced, *kept[1:])]
            for value in (offset, kept[0][0], *others):
                while value % vector:
                    vector //= 2
            along //= vector
    most = _MOST_THREADS // vector
    along_power, across_power = (_power(value, most) for value in (along, across))
    width = min(along_power, _WARP)
    height = min(across_power, most // width)
    width = min(along_power, most // height)
    step_input, step_output = (width, 1) if is_inner else (1, width)
    if -(-inputs // step_input) >= min(height * 16, 256):
        step_input *= height
        is_split = True
    else:
        step_output *= height
        is_split = False
    values = -(-inputs // step_input)
    blocks = -(-(outputs // vector) // step_output)
    target = multiprocessors * (threads // (width * height))
    if not is_split or values < _MOST_VALUES or blocks > target:
        return _Grid(blocks, 1, 1)
    per_output = max(min(-(-target // blocks), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    return _Grid(blocks, per_output, 1 if is_inner else width * vector)


def _power(value: int, most: int) -> int:
    """Returns the largest power of two that is at most a value, at most `most`."""
    return most if value >= most else 1 << (max(value, 1).bit_length() - 1)


def _dimensions(tensor: torch.Tensor, options: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns size and stride in elements of the reduced and of the kept dimensions, innermost first, merged.

    Args:
        tensor: What is reduced.
        options: The operator's arguments from the reduced dimensions on, or from where they would stand.
    """
    rank = tensor.dim()
    dims = next((one for one in options if isinstance(one, (list, tuple)) or type(one) is int), None)
    if dims is None or dims == []:
        chosen = set(range(rank))
    else:
        chosen = {one % rank for one in (dims if isinstance(dims, (list, tuple)) else [dims])} if rank else set()
    every = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    reduced = _merged([every[place] for place in range(rank) if place in chosen])
    return reduced or [(1, 1)], _merged([every[place] for place in range(rank) if place not in chosen])


def _merged(dimensions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for size, stride in sorted(((size, stride) for size, stride in dimensions if size != 1), key=lambda one: one[1]):
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return merged
