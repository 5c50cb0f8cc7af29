"""Dataclasses as JSON containers, by their fields; a field's metadata gives another key, or leaves it out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

Json = dict[str, Any]

_KEY, _CONVERT, _INLINE = "json key", "json convert", "json inline"
_TYPES: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean"}

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


def fields_schema(kind: type) -> Json:
    """Returns the JSON Schema of what ``to_json`` writes of a dataclass; any value may be unknown."""
    hints = get_type_hints(kind)
    properties: Json = {}
    for field in fields(kind):
        name = field.metadata.get(_KEY, "")
        if _INLINE in field.metadata:
            properties |= fields_schema(hints[field.name])["properties"]
        elif name is not None:
            is_same = field.metadata.get(_CONVERT) in (None, or_none)
            properties[name or field.name] = or_null(_type_schema(hints[field.name])) if is_same else {}
    return {"type": "object", "properties": properties, "required": list(properties)}


def or_null(schema: Json) -> Json:
    """Returns a schema that allows what another one does, or null."""
    return {**schema, "type": sorted({schema["type"], "null"})} if "type" in schema else schema


def _type_schema(hint: Any) -> Json:
    if isinstance(hint, type) and is_dataclass(hint):
        return fields_schema(hint)
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    inside = [one for one in get_args(hint) if one not in (type(None), ...)]
    origin = get_origin(hint)
    if origin in (Union, UnionType) and len(inside) == 1:
        return _type_schema(inside[0])
    if origin in (tuple, list) and len(set(inside)) == 1:
        return {"type": "array", "items": _type_schema(inside[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _type_schema(inside[1])}
    return {}


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
