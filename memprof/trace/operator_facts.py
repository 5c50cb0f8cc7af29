"""Facts about torch's operators, each stated once: which are views, products, attention, casts, random draws.

A fact is a set of names without their namespace: ``mm`` means all overloads of the operator, ``add.Tensor`` that one
alone. Names in recordings have a namespace and an overload: ``aten.mm.default``. Nothing here imports torch. Source, if
none is named: aten/src/ATen/native/native_functions.yaml, torch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memprof.trace.schema import Bools, Texts

#: Namespaces of operators that exchange data with other ranks.
COLLECTIVE_SPACES = ("c10d", "_c10d_functional", "c10d_functional")

# Single operators, by their names in recordings.

CAST = "aten._to_copy.default"
CAT = "aten.cat.default"
CLONE = "aten.clone.default"
COPY = "aten.copy_.default"
DETACH = "aten.detach.default"
EMPTY = "aten.empty.memory_format"
EMPTY_STRIDED = "aten.empty_strided.default"
EXPAND = "aten.expand.default"
#: Adds a gradient to another.
GRADIENT_SUM = "aten.add.Tensor"
#: Returns the tensor that ``torch.tensor`` made just before it.
LIFT = "aten.lift_fresh.default"
LOG_SOFTMAX = "aten._log_softmax.default"
#: Begins the node of a base whose view was changed (torch's CopySlices).
NEW_EMPTY_STRIDED = "aten.new_empty_strided.default"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _recorded(text: str) -> tuple[str, ...]:
    return tuple(f"aten.{name}.default" for name in text.split())


#: Kinds of operators whose outputs selective activation checkpointing may keep, as users write them, by the names that
#: the operators have in recordings and in torch's dispatcher.
OPERATOR_KINDS: dict[str, tuple[str, ...]] = {
    "matmul": _recorded("mm addmm bmm baddbmm _scaled_mm _grouped_mm mkldnn_linear"),
    "conv": _recorded("convolution mkldnn_convolution"),
    "attention": _recorded("""
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps
    """),
    "norm": _recorded("""
        native_layer_norm _fused_rms_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm native_group_norm
    """),
    "activation": _recorded("gelu relu silu sigmoid tanh leaky_relu elu hardswish mish"),
    "softmax": _recorded("_softmax _safe_softmax _log_softmax"),
    "pooling": _recorded("""
        max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d max_pool3d_with_indices avg_pool3d
    """),
}
ATTENTION = OPERATOR_KINDS["attention"]

# Products.

BATCHED_PRODUCTS = _names("bmm baddbmm")
#: Those of two matrices, on CPU.
MATRIX_PRODUCTS = _names("mm addmm bmm")
#: What cuBLAS computes on a device, with its workspace.
CUBLAS_PRODUCTS = _names("mm addmm bmm baddbmm _addmm_activation dot mv addmv")
#: The same in the frames of a snapshot, where composite operators stand above them.
ABOVE_CUBLAS = re.compile(r"^aten\.\w*(?:mm|mv|linear|matmul|einsum|dot|bilinear|attention|cdist|lstm|gru|rnn)")
#: Return one entry for each pair of rows of two matrices.
PAIRS = _names("mm addmm _cdist_forward _euclidean_dist")

# Views, copies and casts.

PART_VIEWS = _names("select slice unbind split split_with_sizes chunk as_strided narrow diagonal")
#: Views that a function makes of its own arguments: linear's of its weight, a product's of what it multiplies.
INNER_VIEWS = _names("t view _unsafe_view reshape expand unsqueeze squeeze detach alias")
#: Views that only the code around a function makes.
OUTER_VIEWS = PART_VIEWS | _names("permute transpose movedim swapaxes")
RESHAPES = _names("view _unsafe_view")
#: Copies to another device or type.
TRANSFERS = _names("_to_copy copy_")
#: New tensors with the same elements.
DUPLICATES = _names("_to_copy clone")

# Memory that is allocated without values, with zeros or with one number.

ALLOCATIONS = _names("empty empty_like empty_strided empty_permuted empty_quantized new_empty new_empty_strided")
ZEROS = _names("zeros zeros_like new_zeros")
ONES = _names("ones ones_like new_ones")
#: Move nothing: they allocate without writing, or are views by another name.
MOVES_NOTHING = ALLOCATIONS | {"_unsafe_view"}
#: Fill zeros that formulas of backward have just made, their first argument. ``gather_backward`` adds into them,
#: ``index_backward`` puts into them, in place on plain tensors. With a dispatch mode on, and for fake tensors, torch
#: uses these operators, which return a new tensor (torch/csrc/autograd/FunctionsManual.cpp, areAnyTensorSubclassLike).
FILLS_ZEROS = _names("scatter_add scatter.src index_add index_put masked_scatter slice_scatter")
#: Set a tensor to zero, as optimizers do with gradients.
ZEROING = _names("zero_ _foreach_zero_")

# Values that reach Python.

#: Return a number; the last two reach a dispatch mode only in inference mode, elsewhere as the first.
READS_NUMBER = _names("_local_scalar_dense item is_nonzero")
#: Compare two tensors, and return one truth value.
COMPARES = _names("equal allclose")
READS_VALUE = READS_NUMBER | COMPARES
#: Combine truth values: one where either argument is true.
DISJUNCTIONS = _names("bitwise_or logical_or __or__")

# Random numbers.

#: Draw from a generator.
DRAWS = _names("""
    bernoulli bernoulli_ exponential_ native_dropout normal normal_ rand rand_like randint randint_like randn randn_like
    random_ randperm rrelu_with_noise uniform_
""")
#: Of these, operators whose numbers depend on no tensor.
DRAWS_ALONE = _names("exponential_ normal_ rand rand_like randn randn_like uniform_")
#: Dropout, by its names in the frames of a snapshot. It keeps one byte for each number that it returns.
DROPOUT = re.compile(r"(native_)?(feature_)?dropout[123]?d?$")

# Elementwise operators: each output element depends only on the same element of each input.

POINTWISE = _names("""
    abs add addcdiv addcmul bernoulli bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min
    clone cos div elu elu_backward eq erf exp exp2 expm1 fill floor ge gelu gelu_backward gt hardsigmoid hardswish
    hardswish_backward hardtanh hardtanh_backward le leaky_relu leaky_relu_backward lerp log log1p log2 logical_and
    logical_not logical_or lt masked_fill maximum minimum mish mul native_dropout_backward ne neg pow reciprocal relu
    rsqrt rsub sigmoid sigmoid_backward sign silu silu_backward sin softplus softplus_backward sqrt square sub tanh
    tanh_backward threshold threshold_backward where zeros_like
""")
#: Of these, operators that wrap a number as a tensor of a few bytes, whatever the size of the other input.
WRAPS_NUMBER = _names("add add_ sub sub_ rsub mul mul_ div div_ eq ne lt le gt ge")

# What autograd's nodes run beside their own formulas, and keep.

#: Sums gradients where several paths meet. The engine runs it after releasing the node's saved tensors.
ACCUMULATES = _names("add.Tensor add_.Tensor")
#: Reduces a gradient to a broadcast operand's size or type. The engine runs it after the node's own function has
#: returned and its locals are freed, and before it releases the node's saved tensors.
REDUCES_GRADIENT = _names("sum.dim_IntList _to_copy")
#: Their nodes save the first input, and read nothing of it but its shape.
SHAPE_READERS = _names("gather take _fft_r2c")
#: Normalisations that update running statistics, with the positions of those arguments, and of the argument that says
#: whether they are in training, None if they always are.
RUNNING_STATISTICS: dict[str, tuple[int, int, int | None]] = {
    "native_batch_norm": (3, 4, 5),
    "_native_batch_norm_legit": (3, 4, 5),
    "_batch_norm_with_update": (3, 4, None),
    "cudnn_batch_norm": (3, 4, 5),
    "miopen_batch_norm": (3, 4, 5),
}
#: Replace a tensor's memory.
MOVES_MEMORY = _names("set_ resize_ resize_as_ _resize_output_ record_stream")

# Workspace of kernels.

CONVOLUTIONS = _names("""
    convolution convolution_backward convolution_overrideable convolution_backward_overrideable cudnn_convolution
    cudnn_convolution_add_relu cudnn_convolution_relu cudnn_convolution_transpose
""")
FOURIER_TRANSFORMS = _names("_fft_c2c _fft_r2c _fft_c2r")
#: On CPU, the workspace holds the weights in another layout, independent of the batch (oneDNN).
REORDERS_WEIGHTS = _names("convolution mkldnn_rnn_layer mkldnn_rnn_layer_backward")
#: Hold the weight's gradient in another layout at their end, after freeing the rest of their workspace.
HOLDS_GRADIENT = _names("convolution_backward")
#: Have a workspace of a fixed size per thread: attention's tiles on CPU.
HAS_TILES = _names("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward")
#: On CPU, kernels with temporary memory, or a result whose size their library chooses.
CPU_WORKSPACE = HAS_TILES | _names("""
    conv1d conv2d conv3d convolution convolution_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward native_batch_norm
    native_batch_norm_backward native_group_norm native_layer_norm_backward native_group_norm_backward _cdist_backward
    _euclidean_dist embedding_dense_backward grid_sampler_2d_backward
""")
#: Decompositions and solvers, whose kernels on the processor copy their matrices and take LAPACK's workspace.
CPU_DECOMPOSITIONS = _names("""
    _linalg_svd _linalg_eigh linalg_eig linalg_inv_ex linalg_cholesky_ex linalg_lu_factor_ex _linalg_solve_ex
""")
#: Losses, reduced within the memory of their terms, which some kernels return in full.
CPU_LOSSES = _names("""
    mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_backward
    binary_cross_entropy_with_logits soft_margin_loss soft_margin_loss_backward
""")

# Types in which autocast runs operators on CUDA (aten/src/ATen/autocast_mode.h and autocast_mode.cpp).

#: Run in autocast's type.
AUTOCAST_LOWER = _names("""
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
""")
#: Run in fp32.
AUTOCAST_FP32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
""")
#: Return fp32, unless the job specifies another type.
AUTOCAST_FP32_RESULT = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim
""")
#: Run in the widest type among their arguments.
#: cat and stack are not among them on CUDA: they promote by themselves, without copies.
AUTOCAST_WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
#: Their results stay in float32 under autocast, kept by their own backward or by that of a norm behind them: sums with
#: a residual stream, embeddings, softmax and the like. By their names in the frames of a snapshot.
STAYS_FP32 = re.compile(r"(add_Tensor|embedding|_?(safe_|log_)?softmax(_int|_Dimname)?|exp|rsqrt|reciprocal)$")

# Words in the names of families of operators, with their backward.

ATTENTION_WORDS = ("attention",)
BATCH_NORM_WORDS = ("batch_norm",)
LOSS_WORDS = ("softmax", "loss")
#: The end of a cross-entropy.
NLL_WORDS = ("aten.nll_loss",)
#: Updates by an operator for all parameters, by the form of the optimizer.
UPDATE_WORDS = {"fused": "aten._fused_", "foreach": "aten._foreach_"}
#: Kernels with a workspace about as large as what they read and write.
WORKSPACE_WORDS = (
    *("conv", "rnn", "scaled_dot_product", "norm", "grid_sampler", "cdist", "embedding_dense", "_foreach", "linalg"),
)


def bare_name(name: str) -> str:
    """Returns an operator's name without namespace and overload: ``aten.add.Tensor`` is ``add``."""
    parts = name.removeprefix("aten::").split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else parts[0]


def short_name(name: str) -> str:
    """Returns a name as people read it, without torch's own namespace and the default overload."""
    return name.removeprefix("aten.").removesuffix(".default")


def is_among(name: str, operators: Collection[str]) -> bool:
    """Returns whether an operator of a recording is among those of a fact."""
    space, _, overload = name.replace("::", ".").partition(".")
    return space == "aten" and (overload in operators or overload.partition(".")[0] in operators)


def are_among(names: Texts, operators: Collection[str]) -> Bools:
    """Returns which operators of a recording are among those of a fact, shape ``(names,)``."""
    return _are(names, lambda name: is_among(name, operators))


def have_word(names: Texts, words: Collection[str]) -> Bools:
    """Returns which operators have one of some words in their names, shape ``(names,)``."""
    return _are(names, lambda name: any(word in name for word in words))


def _are(names: Texts, holds: Callable[[str], bool]) -> Bools:
    import numpy as np  # not at the top: the command line reads OPERATOR_KINDS

    texts = names.tolist()
    known = {name: holds(str(name)) for name in set(texts)}
    return np.fromiter((known[name] for name in texts), np.bool_, len(texts))


def written_arguments(schema: Any) -> list[tuple[int, Any]]:
    """Returns the arguments that an operator writes to, with their positions.

    Args:
        schema: Torch's schema of the operator; None for operators without one.
    """
    arguments = schema.arguments if schema is not None else []
    return [(i, a) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]


def is_view(schema: Any) -> bool:
    """Returns whether an operator returns nothing but views of its arguments, and writes to none."""
    returns = schema.returns if schema is not None else []
    return bool(returns) and not written_arguments(schema) and all(each.alias_info is not None for each in returns)
