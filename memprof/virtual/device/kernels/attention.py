"""Scaled dot product attention as CUDA dispatches it: kernel choice, saved tensors, padding.

Source: aten/src/ATen/native/transformers/attention.cpp and cuda/sdp_utils.cpp of torch 2.6 to 2.13.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from memprof.machines.card import Architecture
from memprof.virtual.device.current import CURRENT
from memprof.virtual.device.face import FACE, is_on_device

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
#: Maximum head width of the flash and cuDNN kernels.
_FLASH_WIDTH = 256
#: Head width of the flash kernel is a multiple of this; narrower heads are padded.
_FLASH_STEP = 8
#: Row length of a mask for the efficient kernel is a multiple of this.
_MASK_STEP = 8


class Attention:
    """Replaces `torch.nn.functional.scaled_dot_product_attention` on the device."""

    def __init__(self, architecture: Architecture) -> None:
        """Chooses kernels as torch does on an architecture."""
        self._architecture = architecture

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Computes attention; NotImplemented if it is not on the device."""
        named = dict(zip(_NAMES, args, strict=False)) | kwargs
        # Autocast casts from the last argument to the first (autocast.py).
        value, key, query = (_cast(named[name]) for name in ("value", "key", "query"))
        if not is_on_device(getattr(query, "_local_tensor", query)):  # a DTensor attends with its own rules
            return NotImplemented
        mask, dropout = named.get("attn_mask"), float(named.get("dropout_p", 0.0))
        is_causal, scale = bool(named.get("is_causal", False)), named.get("scale")
        shares_heads = bool(named.get("enable_gqa", False)) and query.shape[-3] != key.shape[-3]
        kernel = self._choose(query, key, value, mask, dropout, is_causal=is_causal, shares_heads=shares_heads)
        if kernel == "math":  # torch's own composite
            CURRENT.attends = True
            try:
                return func(*args, **kwargs)
            finally:
                CURRENT.attends = False
        if kernel == "flash":
            return _flash(query, key, value, dropout, is_causal, scale)
        if mask is not None:
            mask = _bias(_cast(mask), query, key)
        needs_sums = _needs_sums(query, key, value)
        if kernel == "cudnn":
            return _aten._scaled_dot_product_cudnn_attention.default(
                query, key, value, mask, needs_sums, dropout, is_causal, False, scale=scale
            )[0]
        return _aten._scaled_dot_product_efficient_attention.default(
            query, key, value, mask, needs_sums, dropout, is_causal, scale=scale
        )[0]

    def _choose(
        self, query: Any, key: Any, value: Any, mask: Any, dropout: float, *, is_causal: bool, shares_heads: bool
    ) -> str:
        """Returns the first kernel that supports the arguments: ``cudnn``, ``flash``, ``efficient`` or ``math``."""
        takes = {
            "cudnn": self._takes_cudnn,
            "flash": self._takes_flash,
            "efficient": self._takes_efficient,
        }
        if any(tensor.dim() != 4 for tensor in (query, key, value)) or 0 in (*query.shape, *key.shape):
            return "math"
        if not _match(query, key, value, shares_heads=shares_heads):
            return "math"
        if mask is not None and mask.stride(-1) != 1:  # as of a position bias that was permuted
            return "math"
        if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
            return "math"
        for name in self._architecture.attention:
            if name == "cudnn" and dropout and query.shape[-2] == 1:
                continue
            if _is_enabled(name) and takes[name](query, key, value, mask, is_causal, shares_heads):
                return name
        return "math"

    def _takes_cudnn(self, query: Any, key: Any, value: Any, mask: Any, is_causal: bool, _shares: bool) -> bool:
        width = query.shape[-1]
        is_plain = query.dtype in _HALF and width == value.shape[-1] and width <= _FLASH_WIDTH and width % 8 == 0
        trains = not _needs_sums(query, key, value) or width <= 128
        is_whole = key.shape[-2] > 1 and not (is_causal and query.shape[-2] > key.shape[-2])
        is_masked = mask is None or (mask.dim() in (2, 4) and not mask.requires_grad)
        return is_plain and trains and is_whole and is_masked and not _is_deterministic()

    def _takes_flash(self, query: Any, key: Any, value: Any, mask: Any, is_causal: bool, _shares: bool) -> bool:
        width = query.shape[-1]
        if mask is not None or query.dtype not in _HALF or width != value.shape[-1] or width > _FLASH_WIDTH:
            return False
        if is_causal and query.shape[-2] != key.shape[-2]:
            return False
        return not _needs_sums(query, key, value) or width <= self._architecture.flash_backward_width

    def _takes_efficient(self, query: Any, key: Any, value: Any, mask: Any, _causal: bool, shares: bool) -> bool:
        if query.dtype not in (*_HALF, torch.float32) or (
            query.dtype is torch.bfloat16 and not self._architecture.has_bf16_attention
        ):
            return False
        # fp32 on architectures without TF32 has no alignment requirement.
        has_tf32 = self._architecture.has_bf16_attention
        step = 8 if query.dtype in _HALF else 4 if has_tf32 else 1
        return query.shape[-1] % step == 0 and value.shape[-1] % step == 0 and not shares


def _match(query: Any, key: Any, value: Any, *, shares_heads: bool) -> bool:
    """Whether batches and heads are those that the kernels require (`check_batch_size_and_num_heads_dense`)."""
    counted = 1 if shares_heads else 2
    return bool(query.shape[:counted] == key.shape[:counted] == value.shape[:counted])


def masked_in_place(func: Any, args: Any, result: Any) -> torch.Tensor | None:
    """Returns the scores whose memory their sum with the mask takes over; None for other operators.

    The composite adds the mask to the scores in place, but to those of subclasses, as fake tensors are, in a new tensor
    (`_scaled_dot_product_attention_math`).
    """
    is_sum = CURRENT.attends and func is _aten.add.Tensor and args[0].shape == result.shape
    return args[0] if is_sum and args[0].dtype is result.dtype else None


def safe_softmax_sizes(args: Any, result: Any) -> list[int]:
    """Which scores are hidden, which rows hide all of theirs, and a zero for those (`_safe_softmax`, in place)."""
    return [args[0].numel(), result.numel() // max(result.shape[args[1]], 1), result.element_size()]


def _flash(query: Any, key: Any, value: Any, dropout: float, is_causal: bool, scale: Any) -> Any:
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    missing = -width % _FLASH_STEP
    if missing:
        query, key, value = (functional.pad(tensor, (0, missing)) for tensor in (query, key, value))
    found = _aten._scaled_dot_product_flash_attention.default(query, key, value, dropout, is_causal, False, scale=scale)
    return found[0][..., :width] if missing else found[0]


def _bias(mask: Any, query: Any, key: Any) -> Any:
    """Returns a mask as the kernels require it: additive, width a multiple of eight, expanded to every head."""
    if mask.dtype is torch.bool:
        hidden, shown = (torch.scalar_tensor(value, dtype=query.dtype, device=FACE) for value in (-math.inf, 0.0))
        mask = torch.where(mask, shown, hidden)
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    missing = -mask.shape[-1] % _MASK_STEP
    if missing:
        width = mask.shape[-1]
        mask = functional.pad(mask, (0, missing))[..., :width]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _cast(tensor: Any) -> Any:
    """Returns a tensor in autocast's type for attention."""
    if torch.is_autocast_enabled("cuda") and is_on_device(tensor) and tensor.dtype is torch.float32:
        return tensor.to(torch.get_autocast_dtype("cuda"))
    return tensor


def _needs_sums(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _is_deterministic() -> bool:
    """Whether the job asked for an error where an algorithm is not deterministic, as cuDNN's is."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _is_enabled(kernel: str) -> bool:
    """Whether the job left a kernel enabled (`torch.nn.attention.sdpa_kernel`, `torch.backends.cuda`)."""
    switches = torch.backends.cuda
    enabled = {
        "cudnn": switches.cudnn_sdp_enabled,
        "flash": switches.flash_sdp_enabled,
        "efficient": switches.mem_efficient_sdp_enabled,
    }
    return bool(enabled[kernel]())  # type: ignore[no-untyped-call]
