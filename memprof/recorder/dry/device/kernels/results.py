"""The order in which CUDA kernels allocate their results, where it is not the order in which they return them."""

from __future__ import annotations

from typing import Any

import torch

from memprof.recorder.dry.device.current import CURRENT

_aten = torch.ops.aten
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
    """Returns an operator's results in the order in which its kernel allocates them.

    Args:
        func: The operator.
        args: Its arguments.
        result: Its results, in the order in which it returns them.
    """
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
