"""Results on CUDA that torch's CPU build infers in another layout for fake tensors, or not at all."""

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


def _statistics(tensor: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean and inverse deviation of each channel, in fp32 for inputs in half precision.

    Source of these and of the rest of SyncBatchNorm: aten/src/ATen/native/cuda/Normalization.cu, torch 2.13. Its
    temporary buffers for channels in the last place, a few KiB, are left out.
    """
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    first, second = (torch.empty(tensor.shape[1], dtype=dtype, device=tensor.device) for _ in range(2))
    return first, second


def _normalized(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(tensor)


def _statistics_backward(
    _gradient: Any, tensor: Any, mean: Any, _scale: Any, weight: Any, of_tensor: bool, of_weight: bool, of_bias: bool
) -> _Gradients:
    """Returns two sums over each channel, and the gradients of weight and bias."""
    sums = [torch.empty_like(mean) if of_tensor else None for _ in range(2)]
    like = mean if weight is None else weight
    return *sums, *(torch.empty_like(like) if is_wanted else None for is_wanted in (of_weight, of_bias))


def _normalized_backward(_gradient: Any, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(tensor)


#: Shapes of their results.
LAYOUTS: dict[Any, Callable[..., Any]] = {
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.batch_norm_stats.default: _statistics,
    _aten.batch_norm_gather_stats.default: _statistics,
    _aten.batch_norm_gather_stats_with_counts.default: _statistics,
    _aten.batch_norm_elemt.default: _normalized,
    _aten.batch_norm_backward_reduce.default: _statistics_backward,
    _aten.batch_norm_backward_elemt.default: _normalized_backward,
}
