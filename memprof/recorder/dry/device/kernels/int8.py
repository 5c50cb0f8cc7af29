"""Products of bitsandbytes in 8 bits (LLM.int8), whose columns of outliers depend on values: none is assumed.

Few columns of a trained model's activations have outliers (Dettmers et al. 2022, section 4: 0.1 % of all features), and
their copies are as small. Source: bitsandbytes 0.50, backends/cuda/ops.py and backends/default/ops.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.recorder.dry.device.face import FACE

_INT32, _HALF = 4, 2


def int8_shape(func: Any) -> Callable[..., Any] | None:
    """Returns the shape function of an operator of bitsandbytes whose result depends on values; None for others."""
    return _SHAPES.get(func.name()) if getattr(func, "namespace", "") == "bitsandbytes" else None


def int8_sizes(func: Any) -> Callable[[Any, Any], list[int]] | None:
    """Returns the function for the temporary memory of an operator of bitsandbytes; None where it has none."""
    return _TEMPORARIES.get(func.name()) if getattr(func, "namespace", "") == "bitsandbytes" else None


def _quantised(tensor: Any, threshold: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    rows = torch.empty(tensor.shape, dtype=torch.int8, device=FACE)
    largest = torch.empty(tensor.numel() // tensor.shape[-1], dtype=torch.float32, device=FACE)
    return rows, largest, None if threshold == 0.0 else torch.empty(0, dtype=torch.int64, device=FACE)


def _product(tensor: Any, rows: Any, weight: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    result = torch.empty((*rows.shape[:-1], weight.shape[0]), dtype=tensor.dtype, device=FACE)
    return result, torch.empty(0, dtype=tensor.dtype, device=FACE)


def _of_quantised(args: Any, _result: Any) -> list[int]:
    """Magnitudes and the mask of those above the threshold."""
    tensor, threshold = args[0], args[1] if len(args) > 1 else 0.0
    return [tensor.nbytes, tensor.numel()] if threshold else []


def _of_product(_args: Any, result: Any) -> list[int]:
    """The sums in 32 bits and, where the result is of another type, what they are scaled to in float16."""
    made = result[0] if isinstance(result, tuple) else result
    return [made.numel() * _INT32, *([] if made.dtype is torch.float16 else [made.numel() * _HALF])]


_SHAPES: dict[str, Callable[..., Any]] = {
    "bitsandbytes::int8_vectorwise_quant": _quantised,
    "bitsandbytes::int8_mixed_scaled_mm": _product,
}
_TEMPORARIES: dict[str, Callable[[Any, Any], list[int]]] = {
    "bitsandbytes::int8_vectorwise_quant": _of_quantised,
    "bitsandbytes::int8_mixed_scaled_mm": _of_product,
    "bitsandbytes::int8_scaled_mm": _of_product,
}
