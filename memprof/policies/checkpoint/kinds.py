"""The kinds of operators whose outputs selective activation checkpointing may keep."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from memprof.errors import PolicyError

#: Operators of each kind, by their names in torch's dispatcher and in traces.
KINDS: dict[str, tuple[str, ...]] = {
    "matmul": (
        "aten.mm.default",
        "aten.addmm.default",
        "aten.bmm.default",
        "aten.baddbmm.default",
        "aten._scaled_mm.default",
        "aten._grouped_mm.default",
        "aten.mkldnn_linear.default",
    ),
    "conv": ("aten.convolution.default", "aten.mkldnn_convolution.default"),
    "attention": (
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_fused_attention_overrideable.default",
        "aten._scaled_dot_product_attention_math_for_mps.default",
    ),
    "norm": (
        "aten.native_layer_norm.default",
        "aten._fused_rms_norm.default",
        "aten.native_batch_norm.default",
        "aten._native_batch_norm_legit.default",
        "aten.cudnn_batch_norm.default",
        "aten.native_group_norm.default",
    ),
    "activation": (
        "aten.gelu.default",
        "aten.relu.default",
        "aten.silu.default",
        "aten.sigmoid.default",
        "aten.tanh.default",
        "aten.leaky_relu.default",
        "aten.elu.default",
        "aten.hardswish.default",
        "aten.mish.default",
    ),
    "softmax": ("aten._softmax.default", "aten._safe_softmax.default", "aten._log_softmax.default"),
    "pooling": (
        "aten.max_pool2d_with_indices.default",
        "aten.avg_pool2d.default",
        "aten._adaptive_avg_pool2d.default",
        "aten.max_pool3d_with_indices.default",
        "aten.avg_pool3d.default",
    ),
}

#: Why the output of a random operator is not kept.
RANDOM_REFUSAL = (
    "{name} draws random numbers and must run again for those after it to stay the same; leave it out of keep."
)


def changes_in_place(name: str) -> str:
    """Returns the sentence for a module whose forward cannot run again.

    Args:
        name: Its qualified name, "" for the model.
    """
    return (
        f"{name or 'The model'} changes an input or a buffer of its own in place, so its forward cannot run again; "
        "choose modules inside or around it that do not."
    )


def check_kinds(kinds: Iterable[str]) -> None:
    """Checks that each is a kind or looks like an operator's name.

    Raises:
        PolicyError: One is neither; the message lists valid kinds.
    """
    for kind in kinds:
        if kind not in KINDS and "." not in kind:
            near = difflib.get_close_matches(kind, KINDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"write one of {', '.join(KINDS)}"
            raise PolicyError(f"unknown kind of operators {kind!r}; {hint} or a name such as aten.mm.default.")


def operators_of(kinds: Iterable[str]) -> frozenset[str]:
    """Returns the names of all operators of the kinds; operator names are returned as they are."""
    return frozenset(name for kind in kinds for name in KINDS.get(kind, (kind,)))
