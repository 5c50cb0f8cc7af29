"""Biases of linear layers, which torch adds to the product in place where it does not fuse them.

``linear`` (aten/src/ATen/native/Linear.cpp) fuses the bias into the product of contiguous inputs, and otherwise adds it
to the result of ``matmul``. For subclasses of tensors, as fake tensors are, it allocates the sum.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

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
    """Returns the product of a linear layer whose memory the sum with the bias takes over; None for other operators.

    Args:
        func: An operator.
        args: Its arguments.
        result: Its result.
    """
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
