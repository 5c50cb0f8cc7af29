"""Convolutions as cuDNN runs them: workspaces, and results in another layout than on the CPU.

Snapshots of an H200 (torch 2.11, cuDNN 9.19) have these copies and up to 512 bytes more in most convolutions; some have
several MiB more, some gradients of weights many copies of the weight, and some convolutions of few channels nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._meta_registrations import calc_conv_nd_return_shape

from memprof.virtual.device.memory import FREE, RESULTS, copied_steps, result_at

#: cuDNN pads channels to as many bytes for tensor cores: 8 of half types, 4 of TF32 (since 7.6.3; NVIDIA's guide to
#: convolutional layers, "Channels in and out"). In snapshots, fp32 is padded only where a convolution is a product.
_CHANNEL_BYTES = 16
_HALF = (torch.float16, torch.bfloat16)
_FP32 = 4
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_TYPES = (*_HALF, torch.float32)
#: Bytes that cuDNN needs in addition: 16 to 400 in snapshots.
_MORE = 256
_aten = torch.ops.aten
_Gradients = tuple[torch.Tensor | None, ...]


def convolution_steps(args: Any, result: Any) -> list[int]:
    """Arguments in another layout are copied, the input of a 1-D convolution before there is a result.

    Tensor cores need channels last: cuDNN copies other layouts to its workspace, and the result back.

    Source: _convolution (native/Convolution.cpp), cudnn_convolution_forward (native/cudnn/ConvShared.cpp).
    """
    tensor, weight, groups = args[0], args[1], args[-1]
    form = layout_of(tensor, weight)
    before, after = copied_steps(tensor, form), copied_steps(weight, form)
    steps = [*before, RESULTS, *after] if tensor.dim() == 3 else [RESULTS, *after, *before]
    if _is_product(weight, groups):
        return steps
    workspace = _rearranged([tensor, weight, result], weight, groups)
    return [*steps, workspace] if workspace else steps


def convolution_backward_steps(args: Any, _result: Any) -> list[int]:
    """Gradients of the input and of the weight each have a call with a workspace; that of the bias comes last.

    What has another layout is copied: the result's gradient and the input of a 1-D convolution for both calls
    (cudnn_convolution_backward, native/cudnn/ConvShared.cpp).
    """
    gradient, tensor, weight = args[:3]
    stride, groups, mask = args[4], args[-2], args[-1]
    form, is_line = layout_of(tensor, weight), tensor.dim() == 3
    workspace = _rearranged([tensor, gradient, weight], weight, groups)
    steps = [*(copied_steps(tensor, form) if is_line else []), *copied_steps(gradient, form)]
    needed: tuple[list[int], ...] = (
        [*copied_steps(weight, form), 0 if _is_product(weight, groups) else workspace],
        [*([] if is_line else copied_steps(tensor, form)), _of_weight(tensor, weight, stride, groups, workspace)],
        [],
    )
    for place, sizes in enumerate(needed):
        if mask[place]:
            taken = [size for size in sizes if size]
            steps += [result_at(place), *taken, *[FREE] * len(taken)]
    return steps


def _of_weight(tensor: Any, weight: Any, stride: Any, groups: int, rearranged: int) -> int:
    """Returns the workspace of a weight's gradient: a product has a partial one in fp32 of each sample, or copies.

    In fp32, copies where channels are padded, too.
    """
    if not rearranged or not _is_product(weight, groups) or any(one != 1 for one in stride):
        return rearranged
    if tensor.dtype is torch.float32 and _is_padded(tensor, weight):
        return rearranged
    return min(int(tensor.shape[0] * weight.numel()) * _FP32, rearranged)


def layout_of(tensor: Any, weight: Any) -> torch.memory_format:
    """Returns the layout in which a convolution computes (cudnn_conv_suggest_memory_format, native/ConvUtils.h)."""
    if torch.float64 in (tensor.dtype, weight.dtype):
        return torch.contiguous_format
    if _is_channels_last(tensor) or _is_channels_last(weight):
        return _CHANNELS_LAST[tensor.dim()]
    return torch.contiguous_format


def _rearranged(tensors: list[Any], weight: Any, groups: int) -> int:
    first = tensors[0]
    if first.dtype not in _TYPES or not 3 <= first.dim() <= 5:
        return 0
    if _is_channels_last(first):
        return 0
    together = _CHANNEL_BYTES // first.element_size()
    is_padded = _is_padded(first, weight)
    is_depthwise = groups > 1 and weight.shape[1] == 1  # torch's own kernels (is_depthwise, native/Convolution.cpp)
    if is_padded and (first.dim() != 4 or is_depthwise):
        return 0
    if _is_product(weight, groups) or groups > 1:
        tensors = [tensor for tensor in tensors if tensor is not weight]  # its order is the same in both layouts
    step = together if first.dtype in _HALF or _is_product(weight, groups) else 1
    copies = sum(
        tensor.nbytes // tensor.shape[1] * (-(-tensor.shape[1] // step) * step) if tensor.shape[1] else 0
        for tensor in tensors
    )
    return copies + _MORE


def _is_product(weight: Any, groups: int) -> bool:
    """Whether a convolution is a product of matrices: forward and the input's gradient need no copies."""
    return groups == 1 and weight.shape[2:].numel() == 1


def _is_padded(tensor: Any, weight: Any) -> bool:
    together = _CHANNEL_BYTES // tensor.element_size()
    return any(size % together for size in weight.shape[:2])


def _is_channels_last(tensor: Any) -> bool:
    form = _CHANNELS_LAST.get(tensor.dim())
    return form is not None and tensor.is_contiguous(memory_format=form) and not tensor.is_contiguous()


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
