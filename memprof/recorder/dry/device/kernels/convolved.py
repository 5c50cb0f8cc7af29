"""Workspaces of cuDNN's convolutions, which cuDNN chooses: estimates by what tensor cores need.

Snapshots of an H200 (torch 2.11, cuDNN 9.19) have these copies and up to 512 bytes more in most convolutions; some
gradients of weights have several MiB more, and some convolutions of few channels have no workspace.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.recorder.dry.device.memory import FREE, result_at

#: cuDNN pads channels to as many bytes for tensor cores: 8 of half types, 4 of TF32 (since 7.6.3; NVIDIA's guide to
#: convolutional layers, "Channels in and out").
_CHANNEL_BYTES = 16
_TYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Bytes that cuDNN needs in addition: 16 to 400 in snapshots.
_MORE = 256


def convolution_sizes(args: Any, result: Any) -> list[int]:
    """Tensor cores need channels last: cuDNN copies other layouts to its workspace, and the result back."""
    tensor, weight, groups = args[0], args[1], args[-1]
    if _is_product(weight, groups) and not _is_padded(tensor, weight):
        return []
    return [_rearranged([tensor, weight, result], weight, groups)]


def convolution_backward_steps(args: Any, _result: Any) -> list[int]:
    """Gradients of the input and of the weight each have a call with a workspace; that of the bias comes last.

    A result's gradient in another layout than a contiguous input's is copied (cudnn_convolution_backward,
    native/cudnn/ConvShared.cpp).
    """
    gradient, tensor, weight = args[:3]
    groups, mask = args[-2:]
    workspace = _rearranged([tensor, gradient, weight], weight, groups)
    is_other = _is_channels_last(gradient) and tensor.is_contiguous()
    steps: list[int] = [gradient.nbytes] if is_other else []
    for place, needed in enumerate((0 if _is_product(weight, groups) else workspace, workspace, 0)):
        if mask[place]:
            steps += [result_at(place), *([needed, FREE] if needed else [])]
    return steps


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
    if _is_product(weight, groups):
        tensors = [tensor for tensor in tensors if tensor is not weight]  # its order is the same in both layouts
    copies = sum(
        tensor.nbytes // tensor.shape[1] * (-(-tensor.shape[1] // together) * together) if tensor.shape[1] else 0
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
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return form is not None and tensor.is_contiguous(memory_format=form) and not tensor.is_contiguous()
