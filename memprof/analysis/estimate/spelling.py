"""Parses model notation: numbers such as 7B, and shapes such as layers=12,width=768."""

from __future__ import annotations

import dataclasses
import difflib
import re
from decimal import Decimal
from typing import Any

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
        raise UsageError(f"Invalid number of {what} {text!r}: write 1024, 3.2M or 175B.")
    number = Decimal(found["number"]) * 10 ** int(found["power"] or 0) * _FACTORS[found["suffix"].lower()]
    if number != int(number) or not 0 < number <= _LARGEST:
        raise UsageError(f"Invalid number of {what} {text!r}: it must be whole, from 1 to 10^16.")
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
            raise UsageError(f"Invalid key=value of {what}, {pair.strip()!r}: {hint}")
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
