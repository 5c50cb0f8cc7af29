"""Operators whose results or saved tensors differ on CUDA, and sums of gradients.

A tensor with several uses has a gradient from each; autograd adds them up as they arrive
(``InputBuffer::accumulate``, torch/csrc/autograd/input_buffer.cpp). It adds into the sum so far if it holds the last
reference to it and to its storage, which a view shares with its base. Fake tensors are a subclass, for which it always
allocates the sum.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from memprof.recorder.steps.usages import dense_layout
from memprof.virtual.device.current import CURRENT
from memprof.virtual.device.face import FACE

# Operators with a CUDA kernel of their own, which a build of torch without CUDA decomposes instead.
#
# Autograd then saves the tensors that the parts need instead of those the kernel needs. Source: the dispatch of these
# operators in aten/src/ATen/native/native_functions.yaml; torch 2.13.

_KEY = "CUDA"
_FUSED = ("_fused_rms_norm", "silu_backward", "mish_backward")
_ENGINE = torch.autograd.graph.__file__
#: Where torch's optimizers are; they may run inside backward.
_OPTIMIZERS = "torch.optim."
#: References of a tensor: of C++, to its storage, and of Python.
_Counts = tuple[int, int, int]


class FusedKernels:
    """Registers these kernels for CUDA with torch's dispatcher, so that it uses their derivative formulas."""

    def install(self) -> None:
        """Registers them, for good."""
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._library = library  # the registrations end with it
        for name in _FUSED:
            known = hasattr(torch.ops.aten, name)
            if known and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _KEY):
                library.impl(name, _never, _KEY)


def _never(*_args: Any, **_kwargs: Any) -> Any:
    """Placeholder for the kernel: operators return shapes, and no kernel runs."""
    raise NotImplementedError("Internal error in memprof: kernel run on a virtual device.")


_aten = torch.ops.aten


# Products of short types with a result in float32 (`out_dtype`), which only CUDA has.
#
# torch's shapes for them pass the type where a factor is expected: `addmm` in 2.11, `baddbmm` in 2.13.


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


#: The fused kernel reads and writes rows that begin at multiples of this.
_ALIGNMENT_BYTES = 16


# Products of groups of rows with a matrix each, as in mixtures of experts.
#
# Source: create_grouped_gemm_output_tensor in aten/src/ATen/native/GroupedMMUtils.h, and the fallback in
# cuda/GroupedBlas.cpp, which multiplies group by group into the result what the fused kernel does not support: float32
# and float16; torch 2.13.
# The rule for fake tensors accepts bfloat16 alone, and pads no rows in a build for the processor.


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


# Biases of linear layers, which torch adds to the product in place where it does not fuse them.
#
# ``linear`` (aten/src/ATen/native/Linear.cpp) fuses the bias into the product of contiguous inputs, and otherwise
# adds it to the result of ``matmul``. For subclasses of tensors, as fake tensors are, it allocates the sum.

_ADD = torch.ops.aten.add.Tensor
_FRAMES = ("memprof", "torch")
#: Functions of torch that call ``linear``, by file, and add no vector themselves.
_CALLERS = {
    (torch.nn.modules.linear.__file__, "forward"),
    *(
        (torch.nn.functional.__file__, name)
        for name in ("_in_projection", "_in_projection_packed", "multi_head_attention_forward")
    ),
}


def biased_in_place(func: Any, args: Any, result: Any) -> torch.Tensor | None:
    """Returns the product of a linear layer whose memory the sum with the bias takes over; None for other operators."""
    if func is not _ADD or len(args) != 2:
        return None
    product, bias = args
    if not all(isinstance(each, torch.Tensor) for each in args) or bias.dim() != 1 or product.dim() < 2:
        return None
    is_sum = product.shape == result.shape and product.dtype is result.dtype and product.shape[-1] == bias.shape[0]
    return product if is_sum and _calls_linear(sys._getframe(1)) else None


def _calls_linear(frame: FrameType | None) -> bool:
    """Whether a function of torch that calls ``linear`` is innermost but for modes."""
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name) in _CALLERS:
            return True
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _FRAMES:
            return False
        frame = frame.f_back
    return False


# Losses that return a scalar in the memory of all its terms, which are reduced in place.
#
# Source: aten/src/ATen/native/BinaryOps.cpp and Loss.cpp (the structured kernels of mse_loss and smooth_l1_loss resize
# their output and do not shrink its storage), cuda/Loss.cu (binary_cross_entropy_out_cuda); torch 2.13.

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


# The order in which CUDA kernels allocate their results, where it is not the order in which they return them.

#: Results by their places: those named come first.
_FIRST: dict[Any, tuple[int, ...]] = {
    # The mask (dropout_cuda, aten/src/ATen/native/cuda/Dropout.cu).
    _aten.native_dropout: (1,),
    # Seed and offset of dropout (_cudnn_attention_forward, aten/src/ATen/native/transformers/cuda/attention.cu).
    _aten._scaled_dot_product_cudnn_attention: (6, 7),
}
#: Where seed and offset of the efficient kernel's dropout are, but in a captured graph (_efficient_attention_forward).
_PROCESSOR = torch.device("cpu")


def in_order(func: Any, args: Any, result: Any) -> Any:
    """Returns an operator's results in the order in which its kernel allocates them."""
    packet = getattr(func, "overloadpacket", None)
    if packet is _aten._scaled_dot_product_efficient_attention and not CURRENT.is_capturing:
        for seed in result[2:]:
            seed.fake_device = _PROCESSOR
    first = _FIRST.get(packet)
    if packet is _aten._scaled_dot_product_cudnn_attention and not args[4]:  # sums, which nobody asked for
        return [result[6], result[7], result[0]]
    if first is None:
        return result
    return [*(result[place] for place in first), *(one for place, one in enumerate(result) if place not in first)]


class GradientSums:
    """Finds the gradient whose memory a sum of gradients takes over."""

    def __init__(self) -> None:
        """Starts without having seen a sum."""
        # References that the call itself holds, by the depth of modes it passes: the fewest seen so far.
        self._least: dict[int, _Counts] = {}

    def reused(self, func: Any, args: Any, result: Any) -> torch.Tensor | None:
        """Returns the gradient whose memory holds the sum; None if the sum has memory of its own."""
        if func is not _ADD or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return None
        depth = _depth()
        first: torch.Tensor = args[0]
        second: torch.Tensor = args[1]
        if depth < 0 or first is second or not all(_is_plain(value, result) for value in (first, second)):
            return None
        counts = [
            (
                value._use_count(),  # type: ignore[attr-defined]  # not in torch's stubs
                torch._C._storage_Use_Count(value.untyped_storage()._cdata),
                sys.getrefcount(value),
            )
            for value in (first, second)
        ]
        seen = [*counts, self._least[depth]] if depth in self._least else counts
        least = self._least[depth] = tuple(min(column) for column in zip(*seen, strict=True))
        return first if counts[0] == least and dense_layout(first) is not None else None


def _is_plain(value: Any, result: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.dtype is result.dtype
        and value.shape == result.shape
        and hasattr(value, "_use_count")
    )


def _depth() -> int:
    """Returns how many modes the engine's call has passed; -1 if Python code of the job or an optimizer made it."""
    depth, frame = 0, sys._getframe(2)
    while frame is not None:
        code, name = frame.f_code, str(frame.f_globals.get("__name__", ""))
        if code.co_name == "_engine_run_backward" and code.co_filename == _ENGINE:
            return depth
        if code.co_name == "__torch_dispatch__":
            depth += 1
        elif name.partition(".")[0] not in _FRAMES or name.startswith(_OPTIMIZERS):
            return -1
        frame = frame.f_back  # type: ignore[assignment]
    return -1
