"""Products of short types with a result in float32 (`out_dtype`), which only CUDA has.

torch's shapes for them pass the type where a factor is expected: `addmm` in 2.11, `baddbmm` in 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten


def _sum(_addend: Any, left: Any, right: Any, out_dtype: Any, **_factors: Any) -> Any:
    return left.new_empty((*left.shape[:-1], right.shape[-1]), dtype=out_dtype)


def _sum_into(_addend: Any, _left: Any, _right: Any, _out_dtype: Any, *, out: Any, **_factors: Any) -> Any:
    return out


#: Shapes of their results; in versions of torch that have them.
SHAPES: dict[Any, Callable[..., Any]] = {
    getattr(packet, name): shape
    for packet in (_aten.addmm, _aten.baddbmm)
    for name, shape in (("dtype", _sum), ("dtype_out", _sum_into))
    if hasattr(packet, name)
}
