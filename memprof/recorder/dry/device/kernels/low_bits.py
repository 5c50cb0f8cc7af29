"""Products of bitsandbytes in 4 bits and in 8 (LLM.int8), whose columns of outliers depend on values: none is assumed.

Few columns of a trained model's activations have outliers (Dettmers et al. 2022, section 4: 0.1 % of all features), and
their copies are as small. Source: bitsandbytes 0.50, backends/cuda/ops.py and backends/default/ops.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memprof.recorder.dry.device.face import FACE
from memprof.recorder.dry.device.memory import FREE, FREE_BELOW, RESULTS, result_at

_FP32, _HALF = 4, 2
#: The operator of a layer in 4 bits, whose kernels multiply up to so many rows; weights are dequantised for more.
_PRODUCT = "bitsandbytes::gemm_4bit"
_MOST_ROWS, _LEAST_ROWS = 1_536, 4


def low_bit_shape(func: Any) -> Callable[..., Any] | None:
    """Returns the shape function of an operator of bitsandbytes whose result depends on values; None for others."""
    return _SHAPES.get(func.name()) if getattr(func, "namespace", "") == "bitsandbytes" else None


def low_bit_steps(func: Any, args: Any, result: Any) -> list[int] | None:
    """Returns what an operator of bitsandbytes allocates around its results, in order; None for others.

    Args:
        func: The operator.
        args: Its arguments.
        result: Its result.
    """
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
