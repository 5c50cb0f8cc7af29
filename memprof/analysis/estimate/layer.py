"""What one transformer layer saves for backward, tensor by tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from memprof.analysis.estimate.terms import Setting
from memprof.analysis.estimate.transformer import Transformer


@dataclass(frozen=True)
class Kept:
    """A tensor that a layer saves for backward.

    Attributes:
        name: The operation that reads it in backward.
        per: Values per token: ``h`` (width), ``q`` and ``k`` (width of all queries; of all keys), ``f`` (inside
            the MLP), ``as`` (heads times tokens of a sample), ``a`` (heads), ``1``.
        times: Number of such tensors.
        bytes: Bytes per value.
        is_split: Whether tensor parallelism divides it; sequence parallelism divides all.
        is_core: Whether it is in the core of attention, which selective checkpointing recomputes.
        is_statistic: Whether it is a statistic, which published formulas omit.
    """

    name: str
    per: str
    times: int
    bytes: int
    is_split: bool = False
    is_core: bool = False
    is_statistic: bool = False


def kept_by_layer(shape: Transformer, setting: Setting) -> tuple[Kept, ...]:
    """Lists what one layer saves, ignoring checkpointing.

    With 16-bit types, dropout and no flash kernel, the tensors are those of Korthikanti et al. 2022, section 4.1, and
    sum to sbh (34 + 5 as/h). Other types, kernels and layers change individual tensors; statistics, which that section
    omits, are listed with ``is_statistic``.
    """
    return (*_attention(shape, setting), *_mlp(shape, setting), *_norms(shape, setting))


def sizes_of(shape: Transformer, setting: Setting) -> dict[str, int]:
    """Returns the number of values per token for each symbol of ``Kept.per``."""
    return {
        "h": shape.width,
        "q": shape.query_width,
        "k": shape.key_width,
        "f": shape.inner_width,
        "as": shape.heads * setting.length,
        "a": shape.heads,
        "1": 1,
    }


def bytes_of(kept: Iterable[Kept], shape: Transformer, setting: Setting) -> int:
    """Returns the bytes one layer saves in the given tensors on one rank, for the tokens of a micro-batch."""
    sizes, ranks = sizes_of(shape, setting), setting.tensor_ranks
    total = 0
    for one in kept:
        whole = setting.tokens_at_once * sizes[one.per] * one.times * one.bytes
        total += -(-whole // ranks) if one.is_split or setting.is_sequence_parallel else whole
    return total


def formula_of(kept: Iterable[Kept], shape: Transformer, setting: Setting, times: str = "") -> str:
    """Returns the sum of the given tensors as a formula: ``sbh (34 + 5 as/h)`` for one layer.

    Args:
        kept: The tensors.
        shape: The model; widths equal to the residual stream's are written as h.
        setting: How it is trained.
        times: Factor for layers, such as ``L``; "" for one.
    """
    factors = defaultdict[tuple[str, bool], int](int)
    for one in kept:
        letter, factor = _letter(one.per, shape)
        is_split = setting.tensor_ranks > 1 and (one.is_split or setting.is_sequence_parallel)
        factors[letter, is_split] += factor * one.times * one.bytes
    letters = {letter for letter, _ in factors}
    has_h_alone = "h" in letters and letters <= {"h", "as"}
    is_all_split = bool(factors) and all(is_split for _, is_split in factors)
    front = f"{times} " * bool(times) + ("sbh" if has_h_alone else "sb") + ("/t" if is_all_split else "")
    parts = []
    for (letter, is_split), factor in sorted(factors.items(), key=lambda item: item[0][1]):
        below = ["h"] if has_h_alone and letter != "h" else []
        below += ["t"] if is_split and not is_all_split else []
        above = "" if letter == "1" or (has_h_alone and letter == "h") else f" {letter}"
        under = "".join(below)
        parts.append(f"{factor}{above}" + (f"/({under})" if len(under) > 1 else f"/{under}" if under else ""))
    if len(parts) == 1:
        return f"{parts[0]} {front}"
    return f"{front} ({' + '.join(parts)})"


def _letter(letter: str, shape: Transformer) -> tuple[str, int]:
    """Returns a width as a multiple of h where the multiple is a familiar one."""
    if letter in ("q", "k") and shape.query_width == shape.key_width == shape.width:
        return "h", 1
    if letter == "f" and shape.inner_width == 4 * shape.width:
        return "h", 4
    return letter, 1


def _attention(shape: Transformer, setting: Setting) -> list[Kept]:
    values = setting.precision.products
    made = [
        Kept("input of queries, keys and values", "h", _casts(3, setting, is_one=shape.is_fused_qkv), values),
        Kept("queries", "q", 1, values, is_split=True),
        Kept("keys and values", "k", 2, values, is_split=True),
        Kept("input of the output product", "q", 1, values, is_split=True),
    ]
    if setting.has_flash:
        made.append(Kept("sums of the flash kernel", "a", 1, 4, is_split=True, is_statistic=True))
    else:
        scores = setting.softmax_bytes
        made.append(Kept("softmax", "as", 1, scores, is_split=True, is_core=True))
        if _drops(shape.has_attention_dropout, setting):
            mask = setting.mask_bytes(scores)
            made.append(Kept("attention dropout's mask", "as", 1, mask, is_split=True, is_core=True))
            made.append(Kept("scores after dropout", "as", 1, values, is_split=True, is_core=True))
        elif scores != values:
            made.append(Kept("softmax, cast", "as", 1, values, is_split=True, is_core=True))
    if _drops(shape.has_dropout, setting):
        made.append(Kept("dropout's mask", "h", 1, setting.mask_bytes(values)))
    return made


def _mlp(shape: Transformer, setting: Setting) -> list[Kept]:
    values = setting.precision.products
    made = [
        Kept("input of the MLP", "h", _casts(2, setting, is_one=not shape.is_gated), values),
        Kept("input of its output product", "f", 1, values, is_split=True),
    ]
    if shape.activation != "relu":  # ReLU's backward reads its output
        made.append(Kept("input of the activation", "f", 1, values, is_split=True))
    if shape.is_gated:
        made.append(Kept("gate and its multiplicand", "f", 2, values, is_split=True))
    if _drops(shape.has_dropout, setting):
        made.append(Kept("dropout's mask", "h", 1, setting.mask_bytes(values)))
    return made


def _norms(shape: Transformer, setting: Setting) -> list[Kept]:
    wide, small = norm_bytes(shape, setting)
    return [
        Kept("inputs of the norms", "h", 2, wide),
        Kept("statistics of the norms", "1", 2, small, is_statistic=True),
    ]


def norm_bytes(shape: Transformer, setting: Setting) -> tuple[int, int]:
    """Returns what a norm saves: bytes per value of its input, and bytes of statistics per token.

    A layer norm saves its input, mean and deviation, in the input's type on the CPU and in fp32 on a GPU. An RMS norm
    saves its input and one number per token on a GPU; on the CPU torch decomposes it in fp32 and saves two tensors.
    """
    if shape.norm == "layer":
        return setting.precision.stream, 2 * (setting.precision.stream if setting.is_on_cpu else 4)
    return (8, 4) if setting.is_on_cpu else (setting.precision.stream, 4)


def _casts(products: int, setting: Setting, *, is_one: bool) -> int:
    """Returns how many copies of an input several products save: autocast casts it once per product."""
    return products if setting.precision.casts and not is_one else 1


def _drops(has_dropout: bool, setting: Setting) -> bool:
    return has_dropout and setting.has_dropout
