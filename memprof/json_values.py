"""Dataclasses as JSON containers, by their fields; a field's metadata gives another key, or leaves it out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

Json = dict[str, Any]

_KEY, _CONVERT, _INLINE = "json key", "json convert", "json inline"

#: Metadata of a field without a key of its own.
LEFT_OUT: Mapping[str, Any] = {_KEY: None}


def key(name: str = "", convert: Callable[[Any], Any] | None = None) -> Mapping[str, Any]:
    """Returns the metadata of a field with another key or another value in JSON.

    Args:
        name: Its key; "" for the field's name.
        convert: Returns its value in JSON; None for the value itself.
    """
    return {_KEY: name, _CONVERT: convert}


def inline(convert: Callable[[Any], Json] | None = None) -> Mapping[str, Any]:
    """Returns the metadata of a field whose own keys stand in the place of its key.

    Args:
        convert: Returns those keys and their values; None for the fields of a dataclass.
    """
    return {_INLINE: True, _CONVERT: convert}


def or_none(value: Any) -> Any:
    """Returns a value, None for an empty text and other false values."""
    return value or None


def number(value: float) -> float | None:
    """Returns a JSON number; None for NaN and the infinities, which JSON lacks."""
    return value if math.isfinite(value) else None


def to_json(value: Any) -> Any:
    """Returns a value as JSON containers, ready for ``json.dump``.

    A dataclass becomes an object with a key for each field, in the order of the fields; a tuple a list; an enum its
    value; a numpy scalar a Python number; NaN and the infinities None.
    """
    if is_dataclass(value):
        return _object(value)
    if isinstance(value, Mapping):
        return {str(name): to_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(one) for one in value]
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "dtype"):
        value = value.item()
    return number(value) if isinstance(value, float) else value


def _object(value: Any) -> Json:
    found: Json = {}
    for field in fields(value):
        name = field.metadata.get(_KEY, "")
        if name is None:
            continue
        convert = field.metadata.get(_CONVERT) or to_json
        converted = convert(getattr(value, field.name))
        found |= converted if _INLINE in field.metadata else {name or field.name: converted}
    return found
