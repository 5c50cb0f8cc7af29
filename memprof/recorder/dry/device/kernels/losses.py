"""Losses that return a scalar in the memory of all its terms, which are reduced in place.

Source: aten/src/ATen/native/BinaryOps.cpp and Loss.cpp (the structured kernels of mse_loss and smooth_l1_loss resize
their output and do not shrink its storage), cuda/Loss.cu (binary_cross_entropy_out_cuda); torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten
_NO_REDUCTION = 0


def _squared(tensor: Any, target: Any, reduction: int = 1) -> torch.Tensor:
    return _reduced(tensor, target, reduction)


def _smooth(tensor: Any, target: Any, reduction: int = 1, _beta: float = 1.0, **_: Any) -> torch.Tensor:
    return _reduced(tensor, target, reduction)


def _binary(tensor: Any, target: Any, _weight: Any = None, reduction: int = 1) -> torch.Tensor:
    return _reduced(tensor, target, reduction)


def _reduced(tensor: Any, target: Any, reduction: int) -> torch.Tensor:
    shape = torch.broadcast_shapes(tensor.shape, target.shape)  # type: ignore[no-untyped-call]
    dtype = torch.promote_types(tensor.dtype, target.dtype)
    terms = torch.empty(shape, dtype=dtype, device=tensor.device)
    return terms if reduction == _NO_REDUCTION else terms.as_strided((), ())


#: Shapes of their results.
LOSSES: dict[Any, Callable[..., Any]] = {
    _aten.mse_loss.default: _squared,
    _aten.smooth_l1_loss.default: _smooth,
    _aten.binary_cross_entropy.default: _binary,
}
