"""The terms of a transformer's activations: its layers, its ends, and temporaries."""

from __future__ import annotations

from memprof.analysis.estimate.layer import bytes_of, formula_of, kept_by_layer, norm_bytes, sizes_of
from memprof.analysis.estimate.states import count
from memprof.analysis.estimate.terms import Setting, Term
from memprof.analysis.estimate.transformer import Transformer

_KORTHIKANTI = "Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models"
_CHEN = "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, section 4"
_ITEMISED = "; widths and types as in `memprof.analysis.estimate.layer`"


def transformer_terms(shape: Transformer, setting: Setting) -> tuple[Term, ...]:
    """Returns every term of a transformer except weights, gradients and optimizer."""
    layers = _checkpointed(shape, setting) if setting.checkpoint == "layers" else _layers(shape, setting)
    return (*layers, *_ends(shape, setting), *_casts(shape, setting), *_gathered(shape, setting))


def _layers(shape: Transformer, setting: Setting) -> list[Term]:
    """Returns what all layers save: without checkpointing, or with the core of attention recomputed."""
    is_selective = setting.checkpoint == "selective"
    kept = [one for one in kept_by_layer(shape, setting) if not (is_selective and one.is_core)]
    published = [one for one in kept if not one.is_statistic]
    statistics = [one for one in kept if one.is_statistic]
    source = f"{_KORTHIKANTI}, {'section 5' if is_selective else 'section 4'}, table 2"
    if setting.tensor_ranks > 1:
        source += " (tensor and sequence parallelism)" if setting.is_sequence_parallel else " (tensor parallelism)"
    terms = [
        Term(
            "activations",
            "saved by the layers",
            shape.layers * bytes_of(published, shape, setting),
            formula_of(published, shape, setting, "L"),
            source + (_ITEMISED if not _is_published(shape, setting) else ""),
            "fused kernels save fewer tensors, activation functions and rotations implemented in Python more; keys and "
            "values of grouped-query attention that are repeated before the kernel are as wide as queries",
        ),
        Term(
            "activations",
            "statistics",
            shape.layers * bytes_of(statistics, shape, setting),
            formula_of(statistics, shape, setting, "L"),
            "torch's native_layer_norm saves mean and deviation of each token; Dao et al. 2022, FlashAttention, "
            "section 3.1, a sum for each row of scores",
            "norms implemented in Python save whole tensors instead",
        ),
    ]
    if is_selective:
        core = [one for one in kept_by_layer(shape, setting) if one.is_core]
        terms.append(
            Term(
                "temporaries",
                "attention of one layer, recomputed",
                bytes_of(core, shape, setting),
                formula_of(core, shape, setting),
                f"{_KORTHIKANTI}, section 5",
                "kernels without scores, which leave nothing to recompute",
                moment="backward",
            )
        )
    return terms


def _checkpointed(shape: Transformer, setting: Setting) -> list[Term]:
    """Returns what is saved where only the inputs of layers, or of groups of layers, are."""
    kept = kept_by_layer(shape, setting)
    every = min(setting.every, shape.layers)
    segments = -(-shape.layers // every)
    stream = setting.precision.stream
    boundary = setting.tokens_at_once * shape.width * stream
    if setting.is_sequence_parallel:
        boundary = -(-boundary // setting.tensor_ranks)
    over = "/t" if setting.is_sequence_parallel else ""
    held = "L" if every == 1 else f"L/{every}" if shape.layers % every == 0 else str(segments)
    again = every * bytes_of(kept, shape, setting) - boundary
    name = "one layer, recomputed" if every == 1 else f"{every} layers, recomputed"
    return [
        Term(
            "activations",
            "inputs of the layers" if every == 1 else f"inputs of every {every} layers",
            segments * boundary,
            f"{stream} {held} sbh{over}",
            f"{_CHEN}; {_KORTHIKANTI}, table 2 (full recomputation)",
            "checkpoints are not whole layers, or save more than one tensor",
        ),
        Term(
            "temporaries",
            name,
            again,
            f"{formula_of(kept, shape, setting, str(every) if every > 1 else '')} - {stream} sbh{over}",
            f"{_CHEN}: O(n/k) + O(k); the input is counted above",
            "backward of a layer starts before its recompute is complete",
            moment="backward",
        ),
    ]


def _ends(shape: Transformer, setting: Setting) -> list[Term]:
    """Returns what embedding, final norm, head and loss save."""
    values, stream, tokens = setting.precision.products, setting.precision.stream, setting.tokens_at_once
    width, ranks = shape.width, setting.tensor_ranks
    sequence = ranks if setting.is_sequence_parallel else 1
    over, made = "/t" if setting.is_sequence_parallel else "", []
    source = f"{_KORTHIKANTI}, section 4.3 (input and output layers)"
    if shape.has_dropout and setting.has_dropout:
        mask = setting.mask_bytes(stream)
        made.append(
            Term("ends", "dropout of the embedding", -(-tokens * width * mask // sequence), f"{mask} sbh{over}", source)
        )
    wide, small = norm_bytes(shape, setting)
    norms = shape.has_final_norm + shape.has_embedding_norm
    if norms:
        each = width * wide + small
        made.append(
            Term(
                "ends",
                "norms outside the layers",
                -(-norms * tokens * each // sequence),
                f"{norms if norms > 1 else ''} sb{over} ({wide} h + {small})".strip(),
                f"{source}; torch saves their statistics too",
            )
        )
    if shape.has_head:
        reads = values * (2 if shape.has_head_transform else 1)
        made.append(
            Term("ends", "input of the head", -(-tokens * width * reads // sequence), f"{reads} sbh{over}", source)
        )
        made += _loss(shape, setting)
    return made


def _loss(shape: Transformer, setting: Setting) -> list[Term]:
    """Returns what cross-entropy over the vocabulary saves, and what the start of its backward allocates on top."""
    tokens, ranks = setting.tokens_at_once, setting.tensor_ranks
    over = "/t" if ranks > 1 else ""
    kept, logits = setting.loss_bytes, setting.precision.products
    vocabulary = -(-shape.vocabulary // ranks)
    beside = 2 * setting.precision.loss + logits
    return [
        Term(
            "ends",
            "log-probabilities",
            tokens * vocabulary * kept,
            f"{kept} sbv{over}",
            f"{_KORTHIKANTI}, section 4.3 (logits in 32 bits)",
            "a fused or chunked loss saves none",
        ),
        Term(
            "temporaries",
            "logits and gradients of the loss",
            tokens * vocabulary * beside,
            f"{beside} sbv{over}",
            "torch's log_softmax and nll_loss: the logits, the gradients of log-probabilities and of logits",
            "a fused or chunked loss holds only part of them, or the head is divided differently",
            moment="loss",
        ),
    ]


def _casts(shape: Transformer, setting: Setting) -> list[Term]:
    """Returns the 16-bit weight copies that matrix products save under autocast."""
    width = setting.precision.casts
    if not width or setting.zero == 3:
        return []
    source, (inside, outside) = setting.precision.source, _products(shape, setting)
    not_when = "autocast's cache is off, weights are cast earlier, or layers are recomputed after autocast has ended"
    return [
        Term("activations", "weights cast", width * shape.layers * inside, f"{width} L Pm", source, not_when),
        Term("ends", "weights cast", width * outside, f"{width} Pn", source, not_when),
    ]


def _products(shape: Transformer, setting: Setting) -> tuple[int, int]:
    """Returns the number of elements per rank in the matrices of products: in one layer, and outside the layers."""
    parts = [one.on_rank(setting.tensor_ranks) for one in shape.parameters if one.is_product]
    outside = count(one for one in parts if not one.layer)
    if shape.is_tied and shape.has_head:
        outside += -(-shape.vocabulary // setting.tensor_ranks) * shape.width
    return count(one for one in parts if one.layer) // shape.layers, outside


def _gathered(shape: Transformer, setting: Setting) -> list[Term]:
    """Returns what ZeRO 3 gathers temporarily: the ends' weights, and those of two layers."""
    if setting.zero < 3:
        return []
    parts = [one.on_rank(setting.tensor_ranks) for one in shape.parameters]
    layer = count(one for one in parts if one.layer) // shape.layers
    ends = count(one for one in parts if not one.layer)
    precision = setting.precision
    width = precision.casts or precision.weights
    return [
        Term(
            "temporaries",
            "weights gathered, one layer's gradient",
            width * (2 * layer + ends) + precision.gradients * layer,
            f"{width} (2 Pl + Pe) + {precision.gradients} Pl",
            "Zhao et al. 2023, PyTorch FSDP, section 3.3: one unit computing, the next one gathering, root unsharded",
            "units are not single layers, or gathering is bounded differently (DeepSpeed's stage3_max_live_parameters)",
        )
    ]


def letters(shape: Transformer, setting: Setting) -> dict[str, int]:
    """Returns the symbols used in the formulas, with their values."""
    found = {"L": shape.layers, "h": shape.width, "a": shape.heads, "v": shape.vocabulary, "s": setting.length}
    sizes = sizes_of(shape, setting)
    if not shape.query_width == shape.key_width == shape.width:
        found |= {"q": sizes["q"], "k": sizes["k"]}
    if shape.inner_width != 4 * shape.width:
        found["f"] = sizes["f"]
    found["sb"] = setting.tokens_at_once
    if setting.precision.casts and setting.zero < 3:
        found["Pm"], found["Pn"] = _products(shape, setting)
    if setting.tensor_ranks > 1:
        found["t"] = setting.tensor_ranks
    if setting.zero == 3:
        parts = [one.on_rank(setting.tensor_ranks) for one in shape.parameters]
        found["Pl"] = count(one for one in parts if one.layer) // shape.layers
        found["Pe"] = count(one for one in parts if not one.layer)
    return found


def _is_published(shape: Transformer, setting: Setting) -> bool:
    """Whether a layer is the one in the source: 16 bits, dropout, GELU, MLP four times as wide."""
    precision = setting.precision
    return (
        (precision.stream, precision.products, precision.softmax) == (2, 2, 2)
        and shape.has_dropout
        and shape.has_attention_dropout
        and setting.has_dropout
        and not setting.is_on_cpu
        and not setting.has_flash
        and not shape.is_gated
        and shape.activation == "gelu"
        and shape.inner_width == 4 * shape.width
        and shape.query_width == shape.key_width == shape.width
    )
