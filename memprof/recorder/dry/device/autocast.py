"""Autocasting on a virtual device: the types in which torch runs CUDA operators.

torch's own autocast kernels ignore tensors that C++ does not see on the device, such as these (`device.face`); so
the rules are registered again here, at the same dispatch key. Lists and rules: aten/src/ATen/autocast_mode.h
and autocast_mode.cpp, torch 2.13; operators missing from this torch are omitted.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memprof.recorder.dry.device.face import is_on_device

_KEY = "AutocastCUDA"
_LISTS = (list, tuple)
#: Run in autocast's type.
_LOWER = """
_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
"""
#: Run in fp32.
_FULL = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa
"""
#: Return fp32, unless the job specifies another type.
_FULL_RESULT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim
"""
#: Run in the widest type among their arguments.
#: cat and stack are not among them on CUDA: they promote by themselves, without copies.
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
_SHORT = (torch.float16, torch.bfloat16)


class Casts:
    """Copies of parameters in autocast's type, cached until the context exits, as in torch."""

    def __init__(self) -> None:
        """Starts with an empty cache."""
        self._kept: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def install(self) -> None:
        """Registers the rules with torch, for good."""
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._library = library  # the rules are unregistered with it
        rules = ((_LOWER, self._lower), (_FULL, _full), (_FULL_RESULT, _full_result), (_WIDEST, _widest))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns on the job's stderr that its own kernels are overridden
            for names, rule in rules:
                for operator in filter(None, map(_find, names.split())):
                    library.impl(operator, _kernel(operator, rule), _KEY, allow_override=True)
        torch_module: Any = torch
        clear = torch.clear_autocast_cache

        def clear_both() -> None:
            self._kept.clear()
            clear()

        torch_module.clear_autocast_cache = clear_both

    def lower(self, value: Any) -> Any:
        """Returns a tensor in autocast's type; other values unchanged."""
        dtype = torch.get_autocast_dtype("cuda")
        if not _is_eligible(value) or value.dtype is dtype:
            return value
        is_kept = (
            value.dtype is torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
            and not torch.is_inference_mode_enabled()  # since torch 2.11 (pytorch pull request 165068)
        )
        if not is_kept:
            return value.to(dtype)
        known = self._kept.get(id(value))
        if known is None or known[0]() is not value:
            known = self._kept[id(value)] = (weakref.ref(value), value.to(dtype))
        return known[1]

    def _lower(self, operator: Any, args: Any, kwargs: Any) -> Any:
        return _call(operator, args, kwargs, self.lower)


def _find(name: str) -> Any:
    packet_name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    return getattr(packet, overload or "default", None) if packet is not None else None


def _kernel(operator: Any, rule: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return rule(operator, args, kwargs)

    return run


def _full(operator: Any, args: Any, kwargs: Any) -> Any:
    def cast(value: Any) -> Any:
        return value.to(torch.float32) if _is_eligible(value) and value.dtype in _SHORT else value

    return _call(operator, args, kwargs, cast)


def _full_result(operator: Any, args: Any, kwargs: Any) -> Any:
    is_short = _is_eligible(args[0]) and args[0].dtype in _SHORT
    has_dtype = kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)
    if not is_short or has_dtype:
        return operator(*args, **kwargs)
    if operator._schema.name == "aten::norm":
        return torch.ops.aten.norm(*args, **kwargs, dtype=torch.float32)
    return operator(*args, **{**kwargs, "dtype": torch.float32})


def _widest(operator: Any, args: Any, kwargs: Any) -> Any:
    found: list[torch.dtype] = []
    _each(args, lambda value: found.append(value.dtype) if _is_eligible(value) else None)
    wide = torch.float32 if torch.float32 in found or len(set(found)) > 1 else None
    if wide is None:
        return operator(*args, **kwargs)

    def cast(value: Any) -> Any:
        return value.to(wide) if _is_eligible(value) else value

    return _call(operator, args, kwargs, cast)


def _call(operator: Any, args: Any, kwargs: Any, cast: Callable[[Any], Any]) -> Any:
    """Calls an operator on cast arguments.

    The last is cast first: autocast's C++ wrapper casts them in the call's own argument list, which GCC, torch's
    compiler for Linux, evaluates from the right (WrapFunction_, aten/src/ATen/autocast_mode.h).
    """
    found = [_each(value, cast) for value in reversed([*args, *kwargs.values()])][::-1]
    return operator(*found[: len(args)], **dict(zip(kwargs, found[len(args) :], strict=True)))


def _is_eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_on_device(value) and value.dtype in (torch.float32, *_SHORT)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a value with a function applied to every tensor in it, including those in lists."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in _LISTS:
        return type(value)(_each(item, change) for item in value)
    return value
