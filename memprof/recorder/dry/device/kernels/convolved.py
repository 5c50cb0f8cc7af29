"""Workspaces of cuDNN's convolutions, which cuDNN chooses: estimates by what tensor cores need.

Snapshots of an H200 (torch 2.11, cuDNN 9.19) have these copies and up to 512 bytes more in most convolutions; some have
several MiB more, some gradients of weights many copies of the weight, and some convolutions of few channels nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.recorder.dry.device.memory import FREE, RESULTS, copied_steps, result_at

#: cuDNN pads channels to as many bytes for tensor cores: 8 of half types, 4 of TF32 (since 7.6.3; NVIDIA's guide to
#: convolutional layers, "Channels in and out"). In snapshots, fp32 is padded only where a convolution is a product.
_CHANNEL_BYTES = 16
_HALF = (torch.float16, torch.bfloat16)
_FP32 = 4
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_TYPES = (*_HALF, torch.float32)
#: Bytes that cuDNN needs in addition: 16 to 400 in snapshots.
_MORE = 256


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
