"""Results whose layout on CUDA is not the one that torch's CPU build infers for fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._meta_registrations import calc_conv_nd_return_shape

from memprof.recorder.dry.device.kernels.convolved import layout_of

_aten = torch.ops.aten
_Gradients = tuple[torch.Tensor | None, ...]


def _layer_norm_backward(
    _gradient: Any, tensor: Any, _shape: Any, _mean: Any, _scale: Any, weight: Any, bias: Any, mask: Any
) -> _Gradients:
    """The input's gradient is contiguous even where the input is not.

    Source: layer_norm_backward_cuda (aten/src/ATen/native/cuda/layer_norm_kernel.cu).
    """
    return tuple(
        torch.empty_like(one, memory_format=torch.contiguous_format) if is_wanted and one is not None else None
        for one, is_wanted in zip((tensor, weight, bias), mask, strict=True)
    )


def _convolution(
    tensor: Any,
    weight: Any,
    _bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    is_transposed: bool,
    output_padding: Any,
    groups: int,
) -> torch.Tensor:
    shape = calc_conv_nd_return_shape(
        *(tensor, weight, stride, padding, dilation, is_transposed, groups, output_padding if is_transposed else None)
    )
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=layout_of(tensor, weight))


def _convolution_backward(gradient: Any, tensor: Any, weight: Any, sizes: Any, *options: Any) -> _Gradients:
    form, mask = layout_of(tensor, weight), options[-1]
    bias = torch.empty(sizes or (0,), dtype=gradient.dtype, device=gradient.device) if mask[2] else None
    of_tensor, of_weight = (
        torch.empty_like(one, memory_format=form) if is_wanted else None
        for one, is_wanted in zip((tensor, weight), mask, strict=False)
    )
    return of_tensor, of_weight, bias


#: Shapes of their results.
LAYOUTS: dict[Any, Callable[..., Any]] = {
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
}
