"""A model to estimate: known by name (``models.toml``), or by a shape given as ``layers=12,width=768``."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from memprof.analysis.estimate import network, transformer_terms
from memprof.analysis.estimate.network import Network
from memprof.analysis.estimate.states import Parameter, count
from memprof.analysis.estimate.terms import Setting, Term
from memprof.analysis.estimate.transformer import Transformer
from memprof.errors import UsageError

_COUNT = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e(?P<power>[0-9]{1,2}))?\s*(?P<suffix>[kKmMbBgGtT]?)")
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_LARGEST = 10**16
#: Short names of keys, in addition to the fields' names.
_KEYS = {
    "vocab": "vocabulary",
    "tied": "is_tied",
    "gated": "is_gated",
    "bias": "has_bias",
    "qkv_bias": "has_qkv_bias",
    "out_bias": "has_out_bias",
    "fused_qkv": "is_fused_qkv",
    "head": "has_head",
    "embedding_norm": "has_embedding_norm",
    "final_norm": "has_final_norm",
    "dropout": "has_dropout",
    "attention_dropout": "has_attention_dropout",
}
_TRUTH = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
#: Fields of a row besides the shape.
_BESIDE = ("style", "parameters", "published", "note", "source")


@dataclass(frozen=True)
class Model:
    """A model.

    Attributes:
        name: Its name.
        shape: Its shape; a number where only the parameter count is known.
        source: Source of the shape, "" where the user gave it.
        notes: Caveats, as clauses.
    """

    name: str
    shape: Transformer | Network | int
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters."""
        if isinstance(self.shape, int):
            return (Parameter("parameters", (self.shape,), is_product=True, is_split=True),)
        return self.shape.parameters

    @property
    def context(self) -> int:
        """Default tokens per sample; 1 for models without a sequence."""
        return self.shape.context if isinstance(self.shape, Transformer) else 1

    def terms(self, setting: Setting) -> tuple[Term, ...]:
        """Returns every term except weights, gradients and optimizer.

        Raises:
            UsageError: A setting has no formula for this kind of model.
        """
        if isinstance(self.shape, Transformer):
            return transformer_terms.transformer_terms(self.shape, setting)
        if isinstance(self.shape, Network):
            return network.network_terms(self.shape, setting)
        if setting.checkpoint != "none":
            raise UsageError("a parameter count alone gives no activations: give a model's shape to use checkpointing.")
        return ()

    def letters(self, setting: Setting) -> dict[str, int]:
        """Returns the symbols used in the formulas of its layers, with their values."""
        if isinstance(self.shape, Transformer):
            return transformer_terms.letters(self.shape, setting)
        return network.network_letters(setting) if isinstance(self.shape, Network) else {}


def model_of_count(text: str) -> Model:
    """Returns a model with only a parameter count.

    Args:
        text: Such as ``7B``, ``350M`` or ``6738415616``.

    Raises:
        UsageError: The text is not a number.
    """
    return Model(f"{text} parameters", read_count(text, "parameters"))


def read_count(text: str, what: str) -> int:
    """Parses a whole number such as ``1M``, ``3.2M``, ``175e9`` or ``1024``; suffixes are decimal.

    Args:
        text: The number.
        what: What is counted, for the error message.

    Raises:
        UsageError: The text is not a whole number, is 0, or is implausibly large.
    """
    found = _COUNT.fullmatch(text.strip().replace("_", ""))
    if found is None:
        raise UsageError(f"invalid number of {what} {text!r}: write 1024, 3.2M or 175B.")
    number = Decimal(found["number"]) * 10 ** int(found["power"] or 0) * _FACTORS[found["suffix"].lower()]
    if number != int(number) or not 0 < number <= _LARGEST:
        raise UsageError(f"invalid number of {what} {text!r}: it must be whole, from 1 to 10^16.")
    return int(number)


def read_keys(text: str, kind: type[Any], what: str) -> dict[str, Any]:
    """Parses comma-separated ``key=value`` pairs as the fields of a dataclass.

    Args:
        text: The pairs; ``style`` is returned unchanged.
        kind: The dataclass: its fields are whole numbers, booleans or words.
        what: What it describes, for the error message.

    Raises:
        UsageError: A key is unknown or repeated, or its value has the wrong type.
    """
    fields = {field.name: field.type for field in dataclasses.fields(kind)} | {"style": "str"}
    read: dict[str, Any] = {}
    for pair in text.split(","):
        key, is_pair, value = (part.strip() for part in pair.partition("="))
        name = _KEYS.get(key, key)
        if not is_pair or name not in fields:
            near = difflib.get_close_matches(key, [*fields, *_KEYS], n=1)
            hint = f"did you mean {near[0]}?" if near else f"valid keys: {', '.join(_shown(fields))}."
            raise UsageError(f"invalid key=value of {what}, {pair.strip()!r}: {hint}")
        if name in read:
            raise UsageError(f"{key} of {what} is given twice.")
        read[name] = _value(name, value, str(fields[name]))
    return read


def _value(name: str, text: str, kind: str) -> int | bool | str:
    if kind == "bool":
        if text.lower() in _TRUTH:
            return _TRUTH[text.lower()]
        # dropout=0.1: the rate does not matter.
        if re.fullmatch(r"0?\.\d+", text):
            return float(text) > 0
        raise UsageError(f"{name}={text}: write yes or no.")
    if kind == "int":
        return read_count(text, name) if text != "0" else 0
    return text


def _shown(fields: dict[str, Any]) -> list[str]:
    short = {name: key for key, name in _KEYS.items()}
    return [short.get(name, name) for name in fields]


def known_models() -> tuple[str, ...]:
    """Returns the names of the models, in catalogue order."""
    return tuple(_read()["model"])


def is_known(name: str) -> bool:
    """Whether a model with this name is in the catalogue."""
    return _key(name) in {_key(known) for known in known_models()}


def find_model(name: str) -> Model:
    """Looks up a model by name, ignoring case, underscores and spaces.

    Args:
        name: Such as ``gpt3-175b`` or ``LLaMA3-8B``.

    Raises:
        UsageError: Unknown model; the message lists similar names.
    """
    names = {_key(known): known for known in known_models()}
    found = names.get(_key(name))
    if found is None:
        near = difflib.get_close_matches(_key(name), names, n=3, cutoff=0.6)
        hint = (
            f"did you mean {' or '.join(names[key] for key in near)}?" if near else f"known models: {', '.join(names)}."
        )
        raise UsageError(
            f"unknown model {name!r}: {hint} Give other models as --transformer, --mlp, --conv, "
            "--parameters or the path of a config.json."
        )
    row = _read()["model"][found]
    shape = Transformer(**_style(row.get("style", "gpt")), **{key: row[key] for key in row if key not in _BESIDE})
    notes = (row["note"],) if "note" in row else ()
    if "published" in row:
        counted = count(shape.parameters)
        notes = (f"the paper rounds to {row['published']} parameters; its shape has {counted:,}", *notes)
    return Model(found, shape, row["source"], notes)


def read_transformer(text: str) -> Model:
    """Parses a shape such as ``layers=12,width=768,heads=12,vocab=50257``, optionally with ``style=llama``.

    Raises:
        UsageError: A key or value is invalid for a transformer, or one is missing.
    """
    given = read_keys(text, Transformer, "--transformer")
    style = given.pop("style", "gpt")
    missing = [name for name in ("layers", "width", "heads", "vocabulary") if name not in given]
    if missing:
        raise UsageError(f"--transformer needs {', '.join(missing)} too: layers=12,width=768,heads=12,vocab=50257.")
    shape = Transformer(**{**_style(style), "positions": 0, **_implied(given)})
    shape.check_heads()
    return Model(f"transformer {shape.layers}x{shape.width}", shape)


def _implied(given: dict[str, Any]) -> dict[str, Any]:
    """Applies ``dropout=`` and ``bias=`` to attention too, unless its own keys are given."""
    implied: dict[str, Any] = {}
    if "has_dropout" in given:
        implied["has_attention_dropout"] = given["has_dropout"]
    if "has_bias" in given:
        implied |= {"has_qkv_bias": given["has_bias"], "has_out_bias": given["has_bias"]}
    return implied | given


def _style(name: str) -> dict[str, Any]:
    styles = _read()["style"]
    if name not in styles:
        raise UsageError(f"style={name}: write one of {', '.join(styles)}.")
    return dict(styles[name])


def _key(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-")


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))
