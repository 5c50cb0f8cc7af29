"""Kernels of other formats: bitsandbytes' products in 4 and 8 bits, and sparse tensors.

LLM.int8 multiplies columns of outliers apart; few of a trained model's activations have any (Dettmers et al. 2022,
section 4: 0.1 % of all features), and their copies are as small. Source: bitsandbytes 0.50, backends/cuda/ops.py and
backends/default/ops.py.

The size of cuSPARSE's own buffers is not published, and not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memprof.recorder.memory.tensor_memory import parts_of
from memprof.virtual.device.face import FACE
from memprof.virtual.device.memory import FREE, FREE_BELOW, RESULTS, result_at
from memprof.virtual.tensors.fakes import count_places, is_sparse, pattern_of

_FP32, _HALF = 4, 2
#: The operator of a layer in 4 bits, whose kernels multiply up to so many rows; weights are dequantised for more.
_PRODUCT = "bitsandbytes::gemm_4bit"
_MOST_ROWS, _LEAST_ROWS = 1_536, 4
_aten = torch.ops.aten
_INT32, _INT64 = 4, 8
#: Products with a plain matrix, and the place of the sparse one.
_PRODUCTS = {_aten.mm: 0, _aten._sparse_addmm: 1, _aten.addmm: 1}
_ADDED = {_aten.add_, _aten._to_dense}


def low_bit_shape(func: Any) -> Callable[..., Any] | None:
    """Returns the shape function of an operator of bitsandbytes whose result depends on values; None for others."""
    return _SHAPES.get(func.name()) if getattr(func, "namespace", "") == "bitsandbytes" else None


def low_bit_steps(func: Any, args: Any, result: Any) -> list[int] | None:
    """Returns what an operator of bitsandbytes allocates around its results, in order; None for others."""
    steps = _STEPS.get(func.name()) if getattr(func, "namespace", "") == "bitsandbytes" else None
    return None if steps is None else steps(args, result)


def _of_packed(args: Any, _result: Any) -> list[int]:
    """A weight in 4 bits is dequantised for a product without a kernel.

    Scales that are quantised themselves are dequantised into one tensor, and added to their offset in another.
    """
    tensor, _, shape, _, block = args[:5]
    if _has_kernel(tensor, shape, block):
        return [RESULTS]
    scales = args[7] if len(args) > 7 else None
    sizes = [] if scales is None else [scales.numel() * _FP32] * 2
    return [*sizes, shape[0] * shape[1] * tensor.element_size(), RESULTS]


def _has_kernel(tensor: Any, shape: Sequence[int], block: int) -> bool:
    """Whether bitsandbytes multiplies with packed weights: its own rule by shape and device decides, if it is there."""
    inner = tensor.shape[-1]
    rows = tensor.numel() // max(inner, 1)
    if rows <= _LEAST_ROWS:
        return bool(inner % block == 0)
    decides = getattr(sys.modules.get("bitsandbytes.backends.cuda.ops"), "_gemm_4bit_use_custom_fn", None)
    if rows > _MOST_ROWS or inner % block or decides is None:
        return False
    has_kernel: bool = decides(torch.cuda.current_device(), tensor.dtype, rows, shape[0], inner)
    return has_kernel


def _quantised(tensor: Any, threshold: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    rows = torch.empty(tensor.shape, dtype=torch.int8, device=FACE)
    largest = torch.empty(tensor.numel() // tensor.shape[-1], dtype=torch.float32, device=FACE)
    return rows, largest, None if threshold == 0.0 else torch.empty(0, dtype=torch.int64, device=FACE)


def _product(tensor: Any, rows: Any, weight: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    result = torch.empty((*rows.shape[:-1], weight.shape[0]), dtype=tensor.dtype, device=FACE)
    return result, torch.empty(0, dtype=tensor.dtype, device=FACE)


def _of_quantised(args: Any, _result: Any) -> list[int]:
    """Scales and rows; then magnitudes, the mask of those above the threshold, whether any is, and a call for none."""
    tensor, threshold = args[0], args[1] if len(args) > 1 else 0.0
    searched = [tensor.nbytes, tensor.numel(), FREE_BELOW, 1, FREE, 1, FREE] if threshold else []
    return [result_at(1), result_at(0), *searched]


def _of_product(_args: Any, result: Any) -> list[int]:
    """The sums in 32 bits and, where the result is of another type, what they are scaled to in float16."""
    made = result[0] if isinstance(result, tuple) else result
    scaled = [] if made.dtype is torch.float16 else [made.numel() * _HALF]
    return [made.numel() * _INT32, *scaled, RESULTS]


def _scales_first(_args: Any, _result: Any) -> list[int]:
    return [result_at(1), result_at(0)]


_SHAPES: dict[str, Callable[..., Any]] = {
    "bitsandbytes::int8_vectorwise_quant": _quantised,
    "bitsandbytes::int8_mixed_scaled_mm": _product,
}
_STEPS: dict[str, Callable[[Any, Any], list[int]]] = {
    _PRODUCT: _of_packed,
    "bitsandbytes::int8_mixed_scaled_mm": _of_product,
    "bitsandbytes::int8_scaled_mm": _of_product,
    "bitsandbytes::int8_vectorwise_quant": _of_quantised,
    "bitsandbytes::quantize_4bit": _scales_first,
    "bitsandbytes::quantize_blockwise": _scales_first,
}


def sizes_before(func: Any, args: Any) -> list[int]:
    """Returns the bytes that an operator allocates and frees before its result."""
    return _sorting_sizes(args[0]) if func is _aten._coalesce.default and _stored(args[0]) > 1 else []


def sizes_within(func: Any, args: Any, result: Any, processor_bytes: int) -> list[list[int]]:
    """Returns the bytes of temporary tensors on top of an operator's result, those that live together in one list.

    Args:
        func: The operator.
        args: Its arguments.
        result: Its result.
        processor_bytes: What the processor's kernel takes: for operators that torch composes of others.
    """
    packet = getattr(func, "overloadpacket", None)
    if packet is _aten._coalesce:
        return [_sorting_sizes(args[0])[:-1]]
    if packet in _ADDED:
        added = args[1] if packet is _aten.add_ and not is_sparse(args[0]) else args[0]
        if is_sparse(added) and added.layout is torch.sparse_coo and not is_sparse(result):
            return [[] if pattern_of(added).is_coalesced else _flat_sizes(added)]
    if (
        packet in _PRODUCTS
        and is_sparse(left := args[_PRODUCTS[packet]])
        and not is_sparse(args[_PRODUCTS[packet] + 1])
    ):
        zeros = [result.nbytes] if packet is _aten.mm else []
        if left.layout is not torch.sparse_coo:
            return [zeros]
        return _product_sizes(left, args[_PRODUCTS[packet] + 1], result, zeros)
    return [[processor_bytes]]


def _product_sizes(left: Any, right: Any, result: Any, zeros: list[int]) -> list[list[int]]:
    """Rows become compressed in 32 bits, and the result is computed in columns (cuda/SparseBlasLegacy.cpp)."""
    count, held = _stored(left), list(zeros)
    phases = []
    if not pattern_of(left).is_coalesced and count > 1:
        phases.append([*held, *_sorting_sizes(left)])
        stored, count = count, count_places(left)
        held += [part.nbytes // stored * count for part in parts_of(left)]
    rows = (left.shape[0] + 1) * _INT32
    phases.append([*held, rows, count * _INT32])
    is_plain = right.is_contiguous() or right.t().is_contiguous()
    phases.append([*held, rows, count * _INT32, result.nbytes, *([] if is_plain else [right.nbytes])])
    return phases


def _sorting_sizes(tensor: torch.Tensor) -> list[int]:
    """Positions and flat indices, and the copies that Thrust's merge sort takes, last (cuda/SparseCUDATensor.cu)."""
    positions = _stored(tensor) * _INT64
    return [*_flat_sizes(tensor), positions, positions, 2 * positions]


def _flat_sizes(tensor: torch.Tensor) -> list[int]:
    """Indices of several dimensions are flattened to one; of one they are used as they are."""
    return [_stored(tensor) * _INT64] if parts_of(tensor)[0].shape[0] > 1 else []


def _stored(tensor: torch.Tensor) -> int:
    """Returns how many elements a sparse tensor stores."""
    return parts_of(tensor)[-1].shape[0]
