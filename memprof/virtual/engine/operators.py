"""What each operator of Transformer Engine's compiled extension allocates, returns and frees.

Every rule follows the C++ function of its name in transformer_engine/pytorch/csrc/extensions of version 2.20, and has
its parameters. Results are tensors of the virtual device, without values. Temporary tensors are freed on return.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

from memprof.virtual.device.kernels.cuda_kernels import cudnn_backward_bytes
from memprof.virtual.engine.names import ENUMERATIONS, torch_dtype

_FP32 = torch.float32
_BACKENDS = ENUMERATIONS["NVTE_Fused_Attn_Backend"]
#: Widest head of cuDNN's kernels, by the first compute capability that has it.
_WIDEST = {9: 256, 8: 128}
#: Activations that multiply one half of their input with the other.
_GATED = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "situglu", "clamped_swiglu")
_PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
_SOFTMAXES = ("scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked")
#: Blocks of partial sums of the norm of a list of tensors (multi_tensor/l2norm.cpp).
_NORM_BLOCKS = 320


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="cuda")


def _is_kind(value: Any, *names: str) -> bool:
    return type(value).__name__ in names


def create(quantizer: Any, shape: Sequence[int], dtype: Any, device: Any = "cuda", pin_memory: bool = False) -> Any:
    """Returns an empty tensor, quantized if there is a quantizer (``create_tensor`` of quantizer.cpp).

    Raises:
        NotImplementedError: The quantizer is none of FP8 with one scale for each tensor.
    """
    dtype = torch_dtype(dtype)
    if quantizer is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device, pin_memory=pin_memory)
    if not _is_kind(quantizer, "Float8Quantizer", "Float8CurrentScalingQuantizer"):
        raise NotImplementedError(
            f"memprof: {type(quantizer).__name__} cannot be dry-run: only FP8 with delayed or current scaling is."
        )
    new = partial(torch.empty, device=device, pin_memory=pin_memory)
    both = import_module("transformer_engine.pytorch.utils").is_non_tn_fp8_gemm_supported()
    scale_inv = new((1,), dtype=_FP32)
    data = new(tuple(shape), dtype=torch.uint8) if quantizer.rowwise_usage or both else None
    turned = quantizer.columnwise_usage and not both
    transpose = new((shape[-1], *shape[:-1]), dtype=torch.uint8) if turned else None
    kinds = import_module("transformer_engine.pytorch.tensor.float8_tensor")
    known = {"data": data, "fp8_scale_inv": scale_inv, "fp8_dtype": quantizer.dtype, "data_transpose": transpose}
    if quantizer.internal:
        return kinds.Float8TensorStorage(**known, quantizer=quantizer, fake_dtype=dtype)
    return kinds.Float8Tensor(
        shape=tuple(shape), dtype=dtype, **known, quantizer=quantizer, device=torch.device(device)
    )


def _quantized(shape: Sequence[int], dtype: torch.dtype, quantizer: Any) -> Any:
    """Returns the result of a kernel that writes FP8 with a known scale itself, and else rounds a temporary result."""
    made = create(quantizer, shape, dtype)
    if _is_kind(quantizer, "Float8CurrentScalingQuantizer"):
        _empty(shape, dtype)
    return made


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """Rounds a tensor (cast.cpp)."""
    del noop
    given = tensor.contiguous()
    if output is None:
        return create(quantizer, given.shape, given.dtype)
    missing = output._transpose is None and quantizer.columnwise_usage and output._data is not None
    if missing and not import_module("transformer_engine.pytorch.utils").is_non_tn_fp8_gemm_supported():
        shape = output._data.shape
        output._transpose = _empty((shape[-1], *shape[:-1]), torch.uint8)
    output._transpose_invalid = output._transpose is None
    return output


def dequantize(source: Any, otype: Any) -> torch.Tensor:
    """Returns a tensor of a wider type."""
    return _empty(source.size(), torch_dtype(otype))


def fp8_transpose(source: torch.Tensor, otype: Any, *, out: Any = None) -> torch.Tensor:
    """Returns the tensor with its last dimension first (transpose.cpp)."""
    del otype
    return _empty((source.shape[-1], *source.shape[:-1]), torch.uint8) if out is None else out


def bgrad_quantize(source: torch.Tensor, quantizer: Any) -> list[Any]:
    """Returns the gradient of a bias, and the rounded gradient (bias.cpp)."""
    return [_empty(source.shape[-1:], source.dtype), quantize(source, quantizer)]


def multi_tensor_quantize(tensor_list: Sequence[Any], quantizer_list: Sequence[Any]) -> list[Any]:
    """Rounds tensors."""
    return [quantize(tensor, one) for tensor, one in zip(tensor_list, quantizer_list, strict=True)]


def split_quantize(
    tensor: torch.Tensor, split_sections: Sequence[int], quantizer_list: Sequence[Any], *_: Any, **__: Any
) -> list[Any]:
    """Rounds the parts of a tensor."""
    return multi_tensor_quantize(torch.split(tensor, list(split_sections)), quantizer_list)


def generic_gemm(
    first: Any,
    is_first_turned: bool,
    second: Any,
    is_second_turned: bool,
    out: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: torch.Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    *_: Any,
    extra_output: torch.Tensor | None = None,
    **__: Any,
) -> list[Any]:
    """Returns a product, the gradient of the bias, the input of a GELU after it, and what was given (gemm.cpp).

    cuBLAS works in a tensor that Transformer Engine keeps.
    """
    del gelu_in
    shape = _product_shape(first, is_first_turned, second, is_second_turned)
    dtype = torch_dtype(output_dtype if output_dtype is not None else first.dtype)
    low = [value for value in (first, second) if hasattr(value, "_fp8_dtype")]
    result = create(quantizer, shape, dtype) if out is None else out
    if quantizer is not None and not (low and _is_kind(quantizer, "Float8Quantizer")):
        _empty(shape, dtype)
    bias_grad = _empty(second.size()[-1:], dtype) if bias is not None and grad else None
    before = _empty(shape, torch_dtype(bias_type) if low else dtype) if gelu and not grad else None
    return [result, bias_grad, before, extra_output]


def _product_shape(first: Any, is_first_turned: bool, second: Any, is_second_turned: bool) -> tuple[int, ...]:
    """Returns the shape of a product, of matrices as BLAS sees them: by columns."""
    one, other = tuple(first.size()), tuple(second.size())
    rows = (other[-1],) if is_second_turned else other[:-1]
    return (*rows, math.prod(one[:-1]) if is_first_turned else one[-1])


def te_general_grouped_gemm(
    first: Sequence[Any],
    is_first_turned: bool,
    second: Sequence[Any],
    is_second_turned: bool,
    out: Any,
    dtype: Any,
    m_splits: Any,
    bias: Any,
    *_: Any,
) -> Any:
    """Returns the gradients of biases; results are written to tensors, or are temporary without them."""
    del m_splits
    if out is None:
        for one, other in zip(first, second, strict=True):
            _empty(_product_shape(one, is_first_turned, other, is_second_turned), torch_dtype(dtype))
    return bias


def _partial_sums(width: int, count: int, sm_margin: int) -> None:
    """Takes the norms' partial gradients of weights: one row for each multiprocessor (an estimate)."""
    rows = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count - sm_margin
    for _ in range(count):
        _empty((rows, width), _FP32)


def _normalized(source: torch.Tensor, ln_out: Any, quantizer: Any, otype: Any) -> Any:
    return _quantized(source.shape, torch_dtype(otype), quantizer) if ln_out is None else ln_out


def layernorm_fwd(
    source: torch.Tensor,
    weight: Any,
    bias: Any,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    *_: Any,
    **__: Any,
) -> list[Any]:
    """Returns the result, means and inverse deviations (normalization.cpp)."""
    del weight, bias, eps
    rows = (source.numel() // source.shape[-1],)
    means, deviations = _empty(rows, _FP32), _empty(rows, _FP32)
    return [_normalized(source, ln_out, quantizer, otype), means, deviations]


def rmsnorm_fwd(
    source: torch.Tensor, weight: Any, eps: float, ln_out: Any, quantizer: Any, otype: Any, *_: Any, **__: Any
) -> list[Any]:
    """Returns the result, None and inverse deviations."""
    del weight, eps
    deviations = _empty((source.numel() // source.shape[-1],), _FP32)
    return [_normalized(source, ln_out, quantizer, otype), None, deviations]


def layernorm_bwd(
    dz: torch.Tensor, x: torch.Tensor, mu: Any, rsigma: Any, gamma: torch.Tensor, sm_margin: int, *_: Any
) -> list[Any]:
    """Returns the gradients of the source, the weight and the bias."""
    del mu, rsigma
    return [*rmsnorm_bwd(dz, x, None, gamma, sm_margin, sums=2), torch.empty_like(gamma)]


def rmsnorm_bwd(
    dz: torch.Tensor, x: torch.Tensor, rsigma: Any, gamma: torch.Tensor, sm_margin: int, *_: Any, sums: int = 1
) -> list[Any]:
    """Returns the gradients of the input and the weight."""
    given = dz.contiguous(), x.contiguous()
    made = [torch.empty_like(given[1]), torch.empty_like(gamma)]
    _partial_sums(gamma.numel(), sums, sm_margin)
    return made


def rmsnorm_bwd_add(
    dz: torch.Tensor, x: torch.Tensor, add: Any, rsigma: Any, gamma: torch.Tensor, sm_margin: int, *_: Any
) -> list[Any]:
    """Returns the same, with another gradient of the input added."""
    return rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin)


def _activation(divisor: int, source: torch.Tensor, quantizer: Any, *_: Any, **__: Any) -> Any:
    """Returns an activation (activation.cpp)."""
    given = source.contiguous()
    return _quantized((*given.shape[:-1], given.shape[-1] // divisor), given.dtype, quantizer)


def _activation_gradient(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any, *_: Any, **__: Any) -> Any:
    """Returns the gradient of an activation's source."""
    given = grad.contiguous(), fwd_input.contiguous()
    return _quantized(given[1].shape, given[0].dtype, quantizer)


def _bias_gradient(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any, *_: Any) -> list[Any]:
    """Returns the gradient of a bias before an activation, and of the activation's input (bias.cpp)."""
    made = _activation_gradient(grad, fwd_input, quantizer)
    return [_empty(fwd_input.shape[-1:], fwd_input.dtype), made]


def get_fused_attn_backend(params: Any) -> tuple[Any, str]:
    """Returns the kernel of cuDNN for an attention, and why there is none."""
    major = torch.cuda.get_device_capability()[0]
    widest = _WIDEST.get(min(major, max(_WIDEST)), 0)
    width = max(params.head_dim_qk, params.head_dim_v)
    if width % 8 or width > widest:
        return _BACKENDS["NVTE_No_Backend"], f"heads are {width} wide"
    is_wide = torch_dtype(params.qkv_dtype) in (torch.float16, torch.bfloat16)
    return _BACKENDS["NVTE_F16_arbitrary_seqlen" if is_wide else "NVTE_FP8"], ""


def _sizes(shape: Sequence[int], order: str) -> dict[str, int]:
    return dict(zip(order.lower(), shape, strict=True))


def _first_format(layout: Any) -> str:
    """Returns the order of the query's dimensions: s, b (or t for both), h and d."""
    words = layout.name.removeprefix("NVTE_").removeprefix("Paged_KV_").split("_")
    return "".join(letter for letter in words[0] if letter.isalpha()).lower()


def fused_attn_fwd(
    max_seqlen_q: int, max_seqlen_kv: int, is_training: bool, attn_scale: float, p_dropout: float, set_zero: bool,
    qkv_layout: Any, o_format: Any, scale_format: Any, bias_type: Any, mask: Any, softmax: Any, window: Any,
    bottom_right: Any, cu_seqlens_q: torch.Tensor, cu_seqlens_kv: torch.Tensor, query: Any, key: Any, value: Any,
    fake_dtype: torch.dtype, padded_q: Any, padded_kv: Any, table_k: Any, table_v: Any, s_quantizer: Any,
    o_quantizer: Any, added: Any, softmax_offset: Any, rng: Any, rng_elements: int, return_max_logit: bool, *_: Any,
) -> list[Any]:  # fmt: skip
    """Returns the result and what backward needs: sums of exponentials, seed and offset, a bias (attention.cpp).

    cuDNN's forward takes the least workspace, as in torch.
    """
    order = _first_format(qkv_layout)
    sizes = _sizes((*query.size()[:-1], value.size()[-1]), order)
    shape = [sizes[letter] for letter in o_format.name.removeprefix("NVTE_").lower()]
    out = _quantized(shape, fake_dtype, o_quantizer)
    if "t" in order:
        rows: tuple[int, ...] = (sizes["t"], sizes["h"], 1)
    else:
        rows = (sizes["b"], sizes["h"], max_seqlen_q, 1)
    made = [_empty(rows, _FP32) for _ in range(2 if return_max_logit else 1)]
    kept = [each for each in (added, softmax_offset) if each is not None]
    return [out, *made, _empty((2,), torch.int64), *kept]


def fused_attn_bwd(
    max_seqlen_q: int, max_seqlen_kv: int, attn_scale: float, p_dropout: float, set_zero: bool, qkv_layout: Any,
    o_format: Any, do_format: Any, dqkv_layout: Any, scale_format: Any, do_scale_format: Any, bias_type: Any, mask: Any,
    softmax: Any, window: Any, bottom_right: Any, deterministic: bool, cu_seqlens_q: torch.Tensor, cu_seqlens_kv: Any,
    query: Any, key: Any, value: Any, output: Any, gradient: Any, fake_dtype: torch.dtype,
    aux: Sequence[torch.Tensor], padded_q: Any,
    padded_kv: Any, s_quantizer: Any, dp_quantizer: Any, dqkv_quantizer: Any, *_: Any,
) -> list[Any]:  # fmt: skip
    """Returns the gradients of query, key, value, bias and softmax offset; cuDNN's workspace as in torch."""
    order = _first_format(qkv_layout)
    dtype = torch.uint8 if _is_kind(dqkv_quantizer, "Float8Quantizer") else fake_dtype
    shapes = [tuple(each.size()) for each in (query, key, value)]
    gradients = _gradients(dqkv_layout.name, shapes, dtype)
    has_bias = bias_type.name not in ("NVTE_NO_BIAS", "NVTE_ALIBI")
    bias = _empty(aux[-1].shape, dtype) if has_bias else None
    of_query = _sizes(shapes[0], order)
    batch = of_query.get("b", cu_seqlens_q.numel() - 1)
    of_key = _sizes(shapes[1], order)
    like = [
        torch.empty((batch, one["h"], one.get("s", most), one["d"]), dtype=fake_dtype, device="meta")
        for one, most in ((of_query, max_seqlen_q), (of_key, max_seqlen_kv))
    ]
    _empty((cudnn_backward_bytes(*like),), torch.uint8)
    if dqkv_quantizer is not None:
        gradients = [quantize(each, dqkv_quantizer) for each in gradients]
    offset = _empty((1, of_query["h"], 1, 1), _FP32) if softmax.name != "NVTE_VANILLA_SOFTMAX" else None
    return [*gradients, bias, offset]


def _gradients(layout: str, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns tensors for gradients: parts of one, or of two, where query, key and value are."""
    for many, name in ((3, "3"), (2, "2")):
        word = next((word for word in layout.split("_") if name in word), None)
        if word is None:
            continue
        place = len(shapes[-1]) - (len(word) - 1 - word.index(name))
        shape = [*shapes[-1][:place], many, *shapes[-1][place:]]
        parts = list(_empty(shape, dtype).unbind(place))
        return parts if many == 3 else [_empty(shapes[0], dtype), *parts]
    return [_empty(shape, dtype) for shape in shapes]


def _softmax(*args: Any) -> torch.Tensor:
    """Returns a softmax of its source, or that input's gradient (softmax.cpp)."""
    return torch.empty_like(args[0].contiguous())


def _rotated(source: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Returns a tensor with rotary positions (apply_rope.cpp)."""
    return _empty(source.shape, source.dtype)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[torch.Tensor]], *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norm of a list of tensors, and that of each if asked for."""
    _empty((_NORM_BLOCKS,), _FP32)
    tensors = tensor_lists[0]
    count = len(tensors) if rest and rest[-1] is True else 0
    if count:
        _empty((count * max(-(-each.numel() // chunk_size) for each in tensors),), _FP32)
    return _empty((1,), _FP32), _empty((count,), _FP32)


def moe_permute_fwd(
    source: torch.Tensor, dtype: Any, indices: torch.Tensor, num_out_tokens: int, workspace: list[Any], most: int
) -> tuple[Any, ...]:
    """Returns tokens in the order of experts, their rows, and the workspace, made on the first call (permutation.cpp).

    The workspace of the sort is taken to be twice the keys and values.
    """
    if not workspace:
        workspace = [*(_empty((most,), torch.int32) for _ in range(3)), _empty((most * 16,), torch.int8)]
    rows = indices.numel()
    made = _empty((num_out_tokens if num_out_tokens > 0 else rows, source.shape[1]), source.dtype)
    return made, _empty((rows,), torch.int32), workspace


def moe_unpermute_fwd(source: torch.Tensor, dtype: Any, row_id_map: Any, prob: Any, num_tokens: int, *_: Any) -> Any:
    """Returns tokens in their own order; the gradient of the permuted ones, too."""
    return _empty((num_tokens, source.shape[1]), source.dtype)


def moe_unpermute_bwd(
    input_bwd: torch.Tensor, input_fwd: torch.Tensor, dtype: Any, row_id_map: torch.Tensor, prob: torch.Tensor
) -> tuple[Any, ...]:
    """Returns the gradients of permuted tokens and of the probabilities."""
    count = tuple(prob.shape) if prob.numel() else (row_id_map.shape[0], 1)
    return _empty((input_fwd.shape[0], input_bwd.shape[1]), input_bwd.dtype), _empty(count, _FP32)


def dropout_fwd(source: torch.Tensor, dropout_probability: float, out: Any = None) -> list[Any]:
    """Returns the result and a mask of one bit for each element (dropout.cpp)."""
    return [_empty(source.shape, source.dtype) if out is None else out, _empty((source.numel() // 8,), torch.uint8)]


def dropout_bwd(grad_output: torch.Tensor, mask: Any, probability: float, grad_input: Any = None) -> Any:
    """Returns the gradient of the source."""
    return _empty(grad_output.shape, grad_output.dtype) if grad_input is None else grad_input


def _in_place(*_: Any, **__: Any) -> None:
    """Writes to its arguments alone."""


def _functions() -> dict[str, Callable[..., Any]]:
    public = {name: value for name, value in globals().items() if callable(value) and not name.startswith("_")}
    own = {name: value for name, value in public.items() if getattr(value, "__module__", "") == __name__}
    both = ("forward", "backward")
    in_place = (
        *("scale", "scale_tensor", "adam", "adam_param_remainder", "adam_fp8", "adam_capturable", "sgd"),
        *("adam_capturable_master", "compute_scale_and_scale_inv"),
    )
    return {
        **own,
        "create_empty_quantized_tensor": create,
        "moe_permute_bwd": moe_unpermute_fwd,
        "multi_tensor_unscale_l2norm": multi_tensor_l2norm,
        **{name: partial(_activation, 2) for name in _GATED},
        **{name: partial(_activation, 1) for name in _PLAIN},
        **{f"d{name}": _activation_gradient for name in (*_GATED, *_PLAIN)},
        "clamped_dswiglu": _activation_gradient,
        **{f"dbias_d{name}": _bias_gradient for name in _PLAIN},
        **{f"{name}_softmax_{way}": _softmax for name in _SOFTMAXES for way in both},
        **{f"fused_rope_{way}": _rotated for way in both},
        **{f"multi_tensor_{name}": _in_place for name in in_place},
        "fused_amax_and_scale_update_after_reduction": _in_place,
        "get_num_cublas_streams": lambda: 4,
    }


#: By name in the extension.
FUNCTIONS = _functions()
