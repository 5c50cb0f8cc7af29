"""Convolutions as cuDNN runs them: workspaces, and results in another layout than on the CPU.

cuDNN itself is asked where it is installed (`memprof.virtual.cudnn`). Otherwise they are estimates: snapshots of an
H200 (torch 2.11, cuDNN 9.19) have copies and up to 512 bytes more in most convolutions; some have several MiB more,
some gradients of weights many copies of the weight, and some convolutions of few channels nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._meta_registrations import calc_conv_nd_return_shape

from memprof.virtual.cudnn.answers import Answers
from memprof.virtual.cudnn.library import Call, Rules, Tensor
from memprof.virtual.device.memory import FREE, RELEASE, RESULTS, copied_steps, result_at

#: cuDNN pads channels to as many bytes for tensor cores: 8 of half types, 4 of TF32 (since 7.6.3; NVIDIA's guide to
#: convolutional layers, "Channels in and out"). In snapshots, fp32 is padded only where a convolution is a product.
_CHANNEL_BYTES = 16
_HALF = (torch.float16, torch.bfloat16)
_FP32 = 4
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_TYPES = (*_HALF, torch.float32)
_TYPE_NAMES = {
    torch.float16: "HalfTensor",
    torch.bfloat16: "BFloat16Tensor",
    torch.float32: "FloatTensor",
    torch.float64: "DoubleTensor",
}
#: Bytes that cuDNN needs in addition: 16 to 400 in snapshots.
_MORE = 256
#: Rows of a product of matrices are aligned to 16 bytes, or to 8 where the work for each copied number is little: on an
#: H200 in half precision, 1 x 1 convolutions of 14 x 14 are products for 256 and 1,024 channels (205 products for each
#: number), not for 512 and 1,024 (341), and never for 7 x 7.
_ROW_BYTES, _LITTLE_WORK = 8, 256
#: A product's partial gradients are taken while they are at most this many times the copies (1.04 are, 1.74 are not).
_MORE_THAN_COPIES = 1.25
#: cuDNN's numbers of types.
_NUMBERS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 9}
_aten = torch.ops.aten
_Gradients = tuple[torch.Tensor | None, ...]


class Convolutions:
    """What convolutions allocate and free around their results on one device.

    Attributes:
        use_cudnn: Whether any of them ran in cuDNN, and not in torch's own kernels.
    """

    def __init__(self, answers: Answers | None, *, has_tf32: bool) -> None:
        """Starts with no call.

        Args:
            answers: cuDNN's workspaces; None where they are estimated.
            has_tf32: Whether tensor cores take fp32, and cuDNN bf16.
        """
        self._answers = answers
        self._has_tf32 = has_tf32
        self.use_cudnn = False
        self._tried: set[Call] = set()

    def steps_of(self, func: Any, args: Any, result: Any) -> list[int] | None:
        """Returns bytes to allocate, FREE and RESULTS in the order of a convolution; None for other operators."""
        packet = getattr(func, "overloadpacket", None)
        if packet is _aten.convolution:
            return self._forward(args, result)
        return self._backward(args) if packet is _aten.convolution_backward else None

    def _forward(self, args: Any, result: Any) -> list[int]:
        """Arguments in another layout are copied, the input of a 1-D convolution before there is a result.

        Source: _convolution (native/Convolution.cpp), cudnn_convolution_forward (native/cudnn/ConvShared.cpp).
        """
        tensor, weight, groups, is_transposed = args[0], args[1], args[-1], args[-3]
        form = layout_of(tensor, weight)
        before, after = copied_steps(tensor, form), copied_steps(weight, form)
        steps = [*before, RESULTS, *after] if tensor.dim() == 3 else [RESULTS, *after, *before]
        native = self._native_bytes(tensor, weight, result, args[3:])
        if native is not None:
            return [*steps, native] if native else steps
        if _is_product(tensor, weight, args[3], groups):
            return steps
        asked = self._asked("data" if is_transposed else "forward", tensor, weight, result, form, args[3:])
        if asked is not None:
            return [*steps, *asked]
        workspace = 0 if _is_pointwise(weight, groups) else self._rearranged([tensor, weight, result], weight, groups)
        return [*steps, workspace] if workspace else steps

    def _backward(self, args: Any) -> list[int]:
        """Gradients of the input and of the weight each have a call with a workspace; that of the bias comes last.

        What has another layout is copied: the result's gradient and the input of a 1-D convolution for both calls
        (cudnn_convolution_backward, native/cudnn/ConvShared.cpp).
        """
        gradient, tensor, weight = args[:3]
        is_transposed, mask = args[7], args[-1]
        form, is_line = layout_of(tensor, weight), tensor.dim() == 3
        steps = [*(copied_steps(tensor, form) if is_line else []), *copied_steps(gradient, form)]
        kinds = ("forward" if is_transposed else "data", "weight")
        workspaces = [
            self._of_gradient(kind, gradient, tensor, weight, form, args[4:-1]) if is_wanted else []
            for kind, is_wanted in zip(kinds, mask, strict=False)
        ]
        needed: tuple[list[int], ...] = (
            [*copied_steps(weight, form), *workspaces[0]],
            [*([] if is_line else copied_steps(tensor, form)), *workspaces[1]],
            [],
        )
        for place, sizes in enumerate(needed):
            if mask[place]:
                taken = [size for size in sizes if size]
                kept = sum(size > 0 for size in taken) - taken.count(FREE)
                steps += [result_at(place), *taken, *[FREE] * kept]
        return steps

    def _of_gradient(
        self, kind: str, gradient: Any, tensor: Any, weight: Any, form: torch.memory_format, options: Any
    ) -> list[int]:
        """Returns the steps of a gradient's workspace, the weight's or the input's; arguments as for `_asked`."""
        native = self._native_bytes(tensor, weight, gradient, options)
        if native is not None:
            return [native]
        stride, groups = options[0], options[-1]
        rearranged = self._rearranged([tensor, gradient, weight], weight, groups)
        if kind != "weight":
            if _is_product(tensor, weight, stride, groups):
                return []
            asked = self._asked(kind, tensor, weight, gradient, form, options)
            estimated = [] if _is_pointwise(weight, groups) else [rearranged]
            return estimated if asked is None else asked
        partial = _partial_bytes(tensor, weight, stride, groups)
        is_aligned = tensor.shape[2:].numel() * tensor.element_size() % _CHANNEL_BYTES == 0
        if partial and is_aligned and self._answers is not None and partial <= _MORE_THAN_COPIES * rearranged:
            return [partial]
        asked = self._asked(kind, tensor, weight, gradient, form, options)
        estimated = [min(partial, rearranged) if partial else rearranged]
        return estimated if asked is None else asked

    def _native_bytes(self, tensor: Any, weight: Any, result: Any, options: Any) -> int | None:
        """Returns what torch's own kernels need: the windows of one image as columns; None where cuDNN computes.

        Source: use_cudnn (native/Convolution.cpp), slow_conv2d_forward (native/cuda/ConvolutionMM2d.cu). Arguments as
        for `_asked`.
        """
        is_known = self._has_tf32 or torch.bfloat16 not in (tensor.dtype, weight.dtype)
        if torch.backends.cudnn.enabled and is_known:
            self.use_cudnn = True
            return None
        stride, padding, _, is_transposed, _, groups = options
        is_same = _is_pointwise(weight, groups) and set(stride) == {1} and not any(padding)
        if is_same or not result.numel() or _is_depthwise(weight, groups, is_transposed=is_transposed):
            return 0
        windows = (tensor if is_transposed else result).shape[2:].numel()
        return int(weight.shape[1:].numel() * windows * tensor.element_size())

    def _asked(
        self, kind: str, tensor: Any, weight: Any, result: Any, form: torch.memory_format, options: Any
    ) -> list[int] | None:
        """Returns the workspace that cuDNN states, in a first call of ``benchmark`` after the largest it tries.

        torch releases its free memory after it has timed engines (run_single_conv, Conv_v8.cpp).

        Args:
            kind: The call (`Call.kind`).
            tensor: The convolution's input.
            weight: Its weight.
            result: Its result, or the gradient of that.
            form: The layout in which it computes.
            options: Stride, padding, dilation, whether it is transposed, its output's padding and its groups.
        """
        call = _call_of(kind, tensor, weight, result, form, options)
        if self._answers is None or call is None:
            return None
        is_fixed = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
        is_timed = bool(torch.backends.cudnn.benchmark)
        rules = Rules(is_deterministic=is_fixed, allows_tf32=_allows_tf32(), is_timed=is_timed)
        answer = self._answers.ask(call, rules)
        if answer is None:
            return None
        if not is_timed or call in self._tried:
            return [answer.workspace_bytes]
        self._tried.add(call)
        return [answer.most_bytes, FREE, RELEASE, answer.workspace_bytes]

    def _rearranged(self, tensors: list[Any], weight: Any, groups: int) -> int:
        """Returns an estimate where cuDNN cannot be asked: copies to channels last, which tensor cores need."""
        first = tensors[0]
        if first.dtype not in _TYPES or not 3 <= first.dim() <= 5 or _is_channels_last(first):
            return 0
        if first.dtype is torch.float32 and not self._has_tf32:
            return 0
        together = _CHANNEL_BYTES // first.element_size()
        is_padded = _is_padded(first, weight)
        is_depthwise = groups > 1 and weight.shape[1] == 1
        if is_padded and (first.dim() != 4 or is_depthwise):
            return 0
        if _is_pointwise(weight, groups) or groups > 1:
            tensors = [tensor for tensor in tensors if tensor is not weight]  # its order is the same in both layouts
        step = together if first.dtype in _HALF or _is_pointwise(weight, groups) else 1
        copies = sum(
            tensor.nbytes // tensor.shape[1] * (-(-tensor.shape[1] // step) * step) if tensor.shape[1] else 0
            for tensor in tensors
        )
        return copies + _MORE


def layout_of(tensor: Any, weight: Any) -> torch.memory_format:
    """Returns the layout in which a convolution computes (cudnn_conv_suggest_memory_format, native/ConvUtils.h)."""
    if torch.float64 in (tensor.dtype, weight.dtype) or not torch.backends.cudnn.enabled:
        return torch.contiguous_format
    if _is_channels_last(tensor) or _is_channels_last(weight):
        return _CHANNELS_LAST[tensor.dim()]
    return torch.contiguous_format


def _is_pointwise(weight: Any, groups: int) -> bool:
    return groups == 1 and weight.shape[2:].numel() == 1


def _is_depthwise(weight: Any, groups: int, *, is_transposed: bool) -> bool:
    """Whether torch has kernels of its own for it, beside cuDNN's (is_depthwise, native/Convolution.cpp)."""
    return bool(groups > 1 and weight.shape[1] == 1 and not is_transposed)


def _is_product(tensor: Any, weight: Any, stride: Any, groups: int) -> bool:
    """Whether forward or the input's gradient is a product of matrices, which needs no copies."""
    if not _is_pointwise(weight, groups) or any(one != 1 for one in stride) or _is_channels_last(tensor):
        return False
    row_bytes = tensor.shape[2:].numel() * tensor.element_size()
    made, read = weight.shape[:2]
    return bool(
        row_bytes % _CHANNEL_BYTES == 0 or (row_bytes % _ROW_BYTES == 0 and made * read < _LITTLE_WORK * (made + read))
    )


def _partial_bytes(tensor: Any, weight: Any, stride: Any, groups: int) -> int:
    """Returns the workspace of the gradient of a product's weight, a partial one in fp32 of each sample; 0 for others.

    In fp32, a convolution with padded channels does not run as a product.
    """
    if not _is_pointwise(weight, groups) or any(one != 1 for one in stride):
        return 0
    if tensor.dtype is torch.float32 and _is_padded(tensor, weight):
        return 0
    return int(tensor.shape[0] * weight.numel()) * _FP32


def _call_of(kind: str, tensor: Any, weight: Any, result: Any, form: torch.memory_format, options: Any) -> Call | None:
    """Returns a call as cuDNN gets it; None for one that it does not get. Arguments as for `Convolutions._asked`."""
    stride, padding, dilation, is_transposed, _, groups = options
    number = _NUMBERS.get(tensor.dtype)
    if _is_depthwise(weight, groups, is_transposed=is_transposed) and not _is_depthwise_of_cudnn(
        *(tensor, weight, form, stride, dilation)
    ):
        return None
    if number is None or not (tensor.numel() and result.numel()):
        return None
    is_line = tensor.dim() == 3  # computed as if it had a height
    x, y = (result, tensor) if is_transposed else (tensor, result)
    seen = [_seen(one, form, is_line=is_line) for one in (x, weight, y)]
    steps, edges, gaps = (
        (*([first] if is_line else []), *sizes) for first, sizes in ((1, stride), (0, padding), (1, dilation))
    )
    return Call(kind, number, seen[0], seen[1], seen[2], steps, edges, gaps)


def _is_depthwise_of_cudnn(tensor: Any, weight: Any, form: torch.memory_format, stride: Any, dilation: Any) -> bool:
    """Whether cuDNN computes a depthwise convolution, and not a kernel of torch's own.

    Source: use_cudnn_depthwise and check_cudnn_depthwise_workload_with_filter (native/Convolution.cpp).
    """
    if form is not torch.contiguous_format:
        return True
    if tensor.dtype is not torch.float16 or tensor.dim() != 4 or any(gap != 1 for gap in dilation):
        return False
    samples, channels, height, width = tensor.shape
    high, wide = weight.shape[2:]
    is_square = stride[0] == stride[1] and high == wide
    if channels < 32 or width < 7 or wide not in (1, 3, 5) or not (is_square or height == high == 1):
        return False
    if stride[1] != 2 or samples == 1:
        return bool(stride[1] == 1 or (stride[1] == 2 and (wide > 1 or width <= 28)))
    if wide == 1:
        return bool(samples <= 16 and channels >= 128 and width <= 7)
    return bool(channels >= 512 or (channels >= 256 and width >= 28))


def _seen(tensor: Any, form: torch.memory_format, *, is_line: bool) -> Tensor:
    """Returns a tensor as cuDNN sees it in a layout; one with a line of values has a height of 1."""
    sizes = list(tensor.shape)
    if is_line:
        sizes.insert(2, 1)
    return Tensor.dense(sizes, is_channels_last=form is not torch.contiguous_format)


def _allows_tf32() -> bool:
    """Whether convolutions of fp32 may be computed in TF32, by either of torch's settings for it."""
    precision = getattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision", None)
    return precision == "tf32" if precision in ("tf32", "ieee") else bool(torch.backends.cudnn.allow_tf32)


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
    if tensor.dtype is not weight.dtype:  # check_input_same_type_as_parameters, native/Convolution.cpp
        names = (f"torch.cuda.{_TYPE_NAMES.get(one.dtype, one.dtype)}" for one in (tensor, weight))
        raise RuntimeError("Input type ({}) and weight type ({}) should be the same".format(*names))
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
