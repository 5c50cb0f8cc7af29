"""Products of groups of rows with a matrix each, as in mixtures of experts.

Source: create_grouped_gemm_output_tensor in aten/src/ATen/native/GroupedMMUtils.h, and the fallback in
cuda/GroupedBlas.cpp, which multiplies group by group into the result what the fused kernel does not support: float32
and float16; torch 2.13.
The rule for fake tensors accepts bfloat16 alone, and pads no rows in a build for the processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.recorder.dry.device.face import FACE

#: The fused kernel reads and writes rows that begin at multiples of this.
_ALIGNMENT_BYTES = 16


def _grouped(
    left: Any, right: Any, offs: Any = None, _bias: Any = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns the result; a dimension that both operands lack is one of groups, in `offs`."""
    dtype = out_dtype or left.dtype
    shape: list[int]
    if left.dim() == right.dim():
        groups = left.shape[0] if left.dim() == 3 else offs.shape[0]
        shape = [groups, left.shape[-2], right.shape[-1]]
    else:
        shape = [left.shape[-2], right.shape[-1]]
    step = _ALIGNMENT_BYTES // dtype.itemsize
    padded = -(-shape[-1] // step) * step
    stride = [shape[-2] * padded, padded, 1][-len(shape) :]
    return torch.empty_strided(shape, stride, dtype=dtype, device=FACE)


#: Shapes of their results.
GROUPED: dict[Any, Callable[..., Any]] = {torch.ops.aten._grouped_mm.default: _grouped}
