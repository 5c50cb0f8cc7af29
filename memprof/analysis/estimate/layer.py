"""What one transformer layer keeps from forward to backward, tensor by tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from memprof.analysis.estimate.setting import Setting
from memprof.analysis.estimate.transformer import Transformer


@dataclass(frozen=True)
class Kept:
    """A tensor that a layer keeps.

    Attributes:
        name: Who reads it in backward.
        per: What a token has of it: ``h`` (width), ``q`` and ``k`` (width of all queries; of all keys), ``f`` (inside
            the MLP), ``as`` (heads times tokens of a sample), ``a`` (heads), ``1``.
        times: How often.
        bytes: Bytes of one value.
        is_split: Whether tensor parallelism divides it; sequence parallelism divides all.
        is_core: Whether it is in the core of attention, which selective checkpointing runs again.
        is_statistic: Whether it is a statistic, which published formulas leave out.
    """

    name: str
    per: str
    times: int
    bytes: int
    is_split: bool = False
    is_core: bool = False
    is_statistic: bool = False


def kept_by_layer(shape: Transformer, setting: Setting) -> tuple[Kept, ...]:
    """Lists what one layer keeps, checkpointing aside.

    In 16 bits, with dropout and without a flash kernel, the tensors are those of Korthikanti et al. 2022, section 4.1,
    and sum to sbh (34 + 5 as/h). Other types, kernels and layers change single tensors; statistics, which that section
    leaves out, are listed with ``is_statistic``.

    Args:
        shape: The model.
        setting: How it is trained.
    """
    return (*_attention(shape, setting), *_mlp(shape, setting), *_norms(shape, setting))


def sizes_of(shape: Transformer, setting: Setting) -> dict[str, int]:
    """Returns the values a token has of each letter of ``Kept.per``."""
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
    """Returns the bytes that one layer keeps of some tensors on one rank, for the tokens of a micro-batch."""
    sizes, ranks = sizes_of(shape, setting), setting.tensor_ranks
    total = 0
    for one in kept:
        whole = setting.tokens_at_once * sizes[one.per] * one.times * one.bytes
        total += -(-whole // ranks) if one.is_split or setting.is_sequence_parallel else whole
    return total


def formula_of(kept: Iterable[Kept], shape: Transformer, setting: Setting, times: str = "") -> str:
    """Writes the sum of some tensors down: ``sbh (34 + 5 as/h)`` for one layer.

    Args:
        kept: The tensors.
        shape: The model; what is as wide as the residual stream is written as h.
        setting: How it is trained.
        times: Layers, such as ``L``; "" for one.
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
    """Writes a width as a multiple of h where it is one that every reader knows."""
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
    if shape.activation != "relu":  # ReLU's backward reads what it returned
        made.append(Kept("input of the activation", "f", 1, values, is_split=True))
    if shape.is_gated:
        made.append(Kept("gate and what it is multiplied with", "f", 2, values, is_split=True))
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
    """Returns what a norm keeps: bytes for each value of its input, and of statistics for each token.

    A layer norm keeps its input, mean and deviation, of the input's type on the CPU and in fp32 on a GPU; an RMS norm
    its input and one number on a GPU. On the CPU torch writes that out in several operators, in fp32: two tensors.
    """
    if shape.norm == "layer":
        return setting.precision.stream, 2 * (setting.precision.stream if setting.is_on_cpu else 4)
    return (8, 4) if setting.is_on_cpu else (setting.precision.stream, 4)


def _casts(products: int, setting: Setting, *, is_one: bool) -> int:
    """Returns how many copies of an input several products keep: autocast casts it anew for each."""
    return products if setting.precision.casts and not is_one else 1


def _drops(has_dropout: bool, setting: Setting) -> bool:
    return has_dropout and setting.has_dropout
