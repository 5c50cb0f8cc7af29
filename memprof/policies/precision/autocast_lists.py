"""Lists autocast's treatment of each operator, with sources.

Source: pytorch, ``aten/src/ATen/autocast_mode.cpp`` (CPU) and ``aten/src/ATen/autocast_mode.h`` (CUDA), as of torch
2.13; https://docs.pytorch.org/docs/stable/amp.html. A trace holds the operators *below* autocast, so names there
(``matmul``, ``linear``, ``cross_entropy_loss``) are listed here as their lowered forms (``bmm``, ``addmm``,
``nll_loss``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from memprof.trace.files.coding.coded import Coded
from memprof.trace.schema import NONE

if TYPE_CHECKING:
    from memprof.trace.schema import Bools, Ints, Texts

#: Names of autocast's types in the trace.
SHORT_TYPES = {"bf16": "bfloat16", "fp16": "float16"}
#: Categories that belong to the model and exist before its forward.
LASTING = ("parameter", "buffer", "gradient", "optimizer_state")
#: Modules with recurrent layers.
RECURRENT = ("LSTM", "GRU", "RNN")
#: No cast; the result has the widest type among the operands.
WIDEST = 0
#: A view: allocates nothing, and has the type of its input.
VIEW = 1
#: Autocast casts the operands to the short type.
SHORT = 2
#: Autocast casts the operands to float32.
FLOAT32 = 3
#: The result has the type of the activation, whatever the type of the weights (normalization).
FIRST = 4
#: Autocast casts short operands to float32 if any other is float32.
PROMOTE = 5

VIEWS = [
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "permute",
    "detach",
    "select",
    "slice",
    "expand",
    "squeeze",
    "unsqueeze",
    "unbind",
    "split",
    "split_with_sizes",
    "chunk",
    "as_strided",
    "alias",
    "narrow",
    "diagonal",
    "movedim",
    "swapaxes",
    "_reshape_alias",
    "view_as",
    "unfold",
    "lift_fresh",
]

#: Matrix products, convolutions, attention and recurrent layers: autocast's lower_precision_fp on both devices.
SHORT_BOTH = [
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "addbmm",
    "_addmm_activation",
    "mv",
    "dot",
    "linalg_vecdot",
    "convolution",
    "_convolution",
    "prelu",
    "_prelu_kernel",
    "conv_tbc",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "_native_multi_head_attention",
]
SHORT_CPU = ["mkldnn_rnn_layer", "mkldnn_convolution"]
SHORT_CUDA = [
    "addmv",
    "addr",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "_cudnn_rnn",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
]

FLOAT32_BOTH = [
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "nll_loss_forward",
    "nll_loss2d_forward",
    "binary_cross_entropy_with_logits",
    "multilabel_margin_loss_forward",
    "multi_margin_loss",
    "soft_margin_loss",
    "_cdist_forward",
    "prod",
]
FLOAT32_CPU = [
    "avg_pool3d",
    "binary_cross_entropy",
    "grid_sampler_2d",
    "grid_sampler_3d",
    "polar",
    "quantile",
    "nanquantile",
    "stft",
    "trace",
    "max_pool3d_with_indices",
    "max_unpool2d",
    "max_unpool3d",
    "_adaptive_avg_pool3d",
    "reflection_pad1d",
    "reflection_pad2d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "_ctc_loss",
    "_fft_r2c",
    "_fft_c2c",
    "_fft_c2r",
    "linalg_inv_ex",
    "cholesky",
    "linalg_cholesky_ex",
    "linalg_svd",
]
FLOAT32_CUDA = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow",
    "softplus",
    "native_layer_norm",
    "_fused_rms_norm",
    "native_group_norm",
    "norm",
    "linalg_vector_norm",
    "dist",
    "_pdist_forward",
    "renorm",
    "logsumexp",
    "cumprod",
    "cumsum",
    "sum",
    "_softmax",
    "_log_softmax",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
]

#: Operators that models and losses often run in float32: ``softmax(x, dtype=torch.float32)``, ``logits.float()``.
OFTEN_FLOAT32 = ["_softmax", "_log_softmax", "logsumexp"]
#: Operators that models written for short weights or activations run in float32 besides: norms of their own,
#: state-space models.
OFTEN_FLOAT32_SHORT = ["exp", "pow", "rsqrt", "softplus"]

PROMOTE_CPU = ["stack", "cat", "index_copy"]
PROMOTE_CUDA = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "grid_sampler_2d",
    "index_put",
    "scatter_add",
    "stack",
    "cat",
]

#: torch accepts float32 weights with a short activation here; the second and third result stay float32.
FIRST_BOTH = [
    "native_layer_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "cudnn_batch_norm",
    "native_group_norm",
    "_fused_rms_norm",
]

#: Operators whose smaller results (statistics, log-sums) are float32 whatever the compute type.
SIDE_RESULTS = (
    *FIRST_BOTH,
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def plain_names(names: Texts) -> Texts:
    """Strips namespace and overload: ``aten.addmm.default`` to ``addmm``."""
    coded = Coded.of(names)
    stripped = [str(name).split(".")[1] if "." in str(name) else str(name) for name in coded.distinct]
    return np.array(stripped, dtype=object)[coded.codes]


def is_one_of(texts: Texts, wanted: Sequence[str]) -> Bools:
    """Returns which texts are among those wanted; compares by hash, for speed on columns of objects."""
    known = frozenset(wanted)
    return np.fromiter((text in known for text in texts.tolist()), dtype=np.bool_, count=len(texts))


def rules(names: Texts, device: str, stacks: Ints | None = None) -> Ints:
    """Returns autocast's rule for each operator.

    Args:
        names: Plain names, shape ``(ops,)``.
        device: ``cpu`` or ``cuda``: their lists differ.
        stacks: The Python stack of each, NONE where it has none; None if stacks are unknown.

    Returns:
        One of the rules above for each, shape ``(ops,)``.
    """
    table: dict[str, int] = {}
    is_cuda = device != "cpu"
    # Later lists take precedence: CUDA's autocast lists a norm under float32, the CPU's does not list it.
    for listed, rule in (
        (FIRST_BOTH, FIRST),
        (PROMOTE_CUDA if is_cuda else PROMOTE_CPU, PROMOTE),
        (FLOAT32_BOTH, FLOAT32),
        (FLOAT32_CUDA if is_cuda else FLOAT32_CPU, FLOAT32),
        (SHORT_BOTH, SHORT),
        (SHORT_CUDA if is_cuda else SHORT_CPU, SHORT),
        (VIEWS, VIEW),
    ):
        table.update(dict.fromkeys(listed, rule))
    coded = Coded.of(names)
    known = np.array([table.get(name, WIDEST) for name in coded.distinct], dtype=np.int64)[coded.codes]
    if not is_cuda:
        # The CPU's list has cross_entropy_loss: a log_softmax directly followed by nll_loss, in one call.
        is_loss = is_one_of(names, ["nll_loss_forward", "nll_loss2d_forward"])
        stacks = np.full(len(names), NONE, dtype=np.int64) if stacks is None else stacks
        is_one, is_next = _is_one_call(stacks, 1), _is_one_call(stacks, 2)
        softmax = np.flatnonzero((names[:-1] == "_log_softmax") & is_loss[1:] & is_one)
        skipped = np.flatnonzero((names[:-2] == "_log_softmax") & is_loss[2:] & (known[1:-1] == VIEW) & is_next)
        known[softmax] = FLOAT32
        known[skipped] = FLOAT32
    return known


def _is_one_call(stacks: Ints, distance: int) -> Bools:
    """Returns whether operators that far apart come from one line of Python; true where a stack is unknown."""
    first, second = stacks[:-distance], stacks[distance:]
    same: Bools = (first == second) | (first == NONE) | (second == NONE)
    return same
