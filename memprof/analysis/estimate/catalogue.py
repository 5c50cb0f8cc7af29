"""Models known by name (``models.toml``), and shapes given as ``layers=12,width=768``."""

from __future__ import annotations

import difflib
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from memprof.analysis.estimate.model import Model
from memprof.analysis.estimate.parameters import count
from memprof.analysis.estimate.spelling import read_keys
from memprof.analysis.estimate.transformer import Transformer
from memprof.errors import UsageError

#: Fields of a row besides the shape.
_BESIDE = ("style", "parameters", "published", "note", "source")


def known_models() -> tuple[str, ...]:
    """Returns the names of the models, in catalogue order."""
    return tuple(_read()["model"])


def published_parameters(name: str) -> int | None:
    """Returns the exact parameter count published by a model's source; None where it is rounded."""
    found: int | None = _read()["model"][name].get("parameters")
    return found


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
            f"Unknown model {name!r}: {hint} Give other models as --transformer, --mlp, --conv, "
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
