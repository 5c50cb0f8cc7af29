"""Reads a model's shape from a config.json of the transformers library, as data; no code is executed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from memprof.analysis.estimate.model import Model
from memprof.analysis.estimate.transformer import Transformer
from memprof.errors import BadInputError, UsageError
from memprof.trace.files.reading import parse_json, read_bytes

_MOST_BYTES = 2**22


def is_config(text: str) -> bool:
    """Whether a command-line word names a file rather than a model."""
    return text.endswith(".json") or "/" in text or Path(text).exists()


def read_config(path: Path) -> Model:
    """Reads a config.json, or the one in a folder.

    Raises:
        BadInputError: The file does not exist, is not a config.json, or its model family is unsupported.
    """
    if path.is_dir():
        path = path / "config.json"
    try:
        raw = read_bytes(path, _MOST_BYTES)
    except OSError as error:
        raise BadInputError(f"{path} cannot be read ({error.strerror}): give the path of a config.json.") from None
    try:
        record = parse_json(raw)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise BadInputError(f"{path} is not a config.json: it contains no JSON object with a model's sizes.")
    family = record.get("model_type")
    read = _FAMILIES.get(family) if isinstance(family, str) else None
    if read is None:
        raise BadInputError(
            f"{path} has the unsupported model type {family!r} (supported: {', '.join(_FAMILIES)}): "
            "give the sizes as --transformer layers=…,width=…,heads=…,vocab=…"
        )
    keys = _Keys(path, record)
    try:
        shape, notes = read(keys)
        shape.check_heads()
    except UsageError as error:
        raise BadInputError(f"{path} contains no valid transformer sizes. {error}") from None
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    return Model(name, shape, f"{path} ({family})", notes)


class _Keys:
    """The keys of a config.json, each checked for its type."""

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self._path, self._record = path, record

    def size(self, name: str, missing: int | None = None) -> int:
        """Returns a size; null counts as missing.

        Raises:
            BadInputError: It is missing or not a number.
        """
        value = self._record.get(name)
        if value is None and missing is not None:
            return missing
        if type(value) is not int or not 0 < value <= 10**12:
            raise BadInputError(f"{self._path}: {name!r} must be a positive whole number, not {value!r}.")
        return value

    def is_on(self, name: str, missing: bool) -> bool:
        """Whether a setting is on: true, or a share above 0.

        Raises:
            BadInputError: It is of another type.
        """
        value = self._record.get(name)
        if value is None:
            return missing
        if not isinstance(value, bool | int | float):
            raise BadInputError(f"{self._path}: {name!r} must be true, false or a share, not {value!r}.")
        return value > 0

    def word(self, name: str, missing: str) -> str:
        """Returns a string value."""
        value = self._record.get(name)
        return value if isinstance(value, str) else missing

    @property
    def architecture(self) -> str:
        """The class the model was saved as, "" where not given."""
        named = self._record.get("architectures")
        return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


_Read = tuple[Transformer, tuple[str, ...]]


def _gpt2(keys: _Keys) -> _Read:
    width = keys.size("n_embd", 768)
    written, notes = _activation(keys.word("activation_function", "gelu_new"))
    return Transformer(
        layers=keys.size("n_layer", 12),
        width=width,
        heads=keys.size("n_head", 12),
        vocabulary=keys.size("vocab_size", 50257),
        inner=keys.size("n_inner", 4 * width),
        positions=keys.size("n_positions", 1024),
        is_tied=keys.is_on("tie_word_embeddings", missing=True),
        has_dropout=keys.is_on("resid_pdrop", missing=True),
        has_attention_dropout=keys.is_on("attn_pdrop", missing=True),
        activation=written,
        context=keys.size("n_positions", 1024),
    ), notes


def _llama(keys: _Keys) -> _Read:
    has_bias = keys.is_on("attention_bias", missing=False)
    return _rotary(keys, has_qkv_bias=has_bias, has_out_bias=has_bias)


def _mistral(keys: _Keys) -> _Read:
    return _rotary(keys, has_qkv_bias=False)


def _qwen2(keys: _Keys) -> _Read:
    return _rotary(keys, has_qkv_bias=True)


def _rotary(keys: _Keys, *, has_qkv_bias: bool, has_out_bias: bool = False) -> _Read:
    heads = keys.size("num_attention_heads")
    written, notes = _activation(keys.word("hidden_act", "silu"))
    return Transformer(
        layers=keys.size("num_hidden_layers"),
        width=keys.size("hidden_size"),
        heads=heads,
        kv_heads=keys.size("num_key_value_heads", heads),
        head_width=keys.size("head_dim", keys.size("hidden_size") // heads),
        vocabulary=keys.size("vocab_size"),
        inner=keys.size("intermediate_size"),
        is_gated=True,
        activation=written,
        norm="rms",
        has_bias=keys.is_on("mlp_bias", missing=False),
        has_qkv_bias=has_qkv_bias,
        has_out_bias=has_out_bias,
        is_fused_qkv=False,
        is_tied=keys.is_on("tie_word_embeddings", missing=False),
        has_dropout=False,
        has_attention_dropout=keys.is_on("attention_dropout", missing=False),
        context=keys.size("max_position_embeddings", 2048),
    ), notes


def _bert(keys: _Keys) -> _Read:
    written, notes = _activation(keys.word("hidden_act", "gelu"))
    is_masked = keys.architecture in ("BertForMaskedLM", "BertForPreTraining")
    if keys.architecture not in ("", "BertModel", "BertForMaskedLM"):
        notes = (*notes, f"only the token prediction part of the head of {keys.architecture} is counted")
    return Transformer(
        layers=keys.size("num_hidden_layers", 12),
        width=keys.size("hidden_size", 768),
        heads=keys.size("num_attention_heads", 12),
        vocabulary=keys.size("vocab_size", 30522),
        inner=keys.size("intermediate_size", 3072),
        positions=keys.size("max_position_embeddings", 512),
        segments=keys.size("type_vocab_size", 2),
        activation=written,
        is_fused_qkv=False,
        is_tied=keys.is_on("tie_word_embeddings", missing=True),
        has_head=is_masked,
        has_head_transform=is_masked,
        has_embedding_norm=True,
        has_final_norm=False,
        has_pooler=keys.architecture != "BertForMaskedLM",
        has_dropout=keys.is_on("hidden_dropout_prob", missing=True),
        has_attention_dropout=keys.is_on("attention_probs_dropout_prob", missing=True),
        context=keys.size("max_position_embeddings", 512),
    ), notes


def _activation(name: str) -> tuple[str, tuple[str, ...]]:
    """Returns the activation function used in the formulas, and a note on it."""
    if name in ("relu", "silu", "gelu"):
        return name, ()
    if name in ("gelu_pytorch_tanh", "swish"):
        return ("silu" if name == "swish" else "gelu"), ()
    return "gelu", (f"{name} is counted as one operator; implemented in Python it saves several more tensors",)


_FAMILIES: dict[str, Callable[[_Keys], _Read]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "bert": _bert,
}
