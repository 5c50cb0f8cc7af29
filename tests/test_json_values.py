"""Dataclasses as JSON: keys, other names, fields left out, and values that JSON lacks."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import jsonschema
import numpy as np
import pytest

from memprof.json_values import LEFT_OUT, fields_schema, inline, key, or_none, to_json


class Kind(Enum):
    FULL = "full"


@dataclass(frozen=True)
class Place:
    file: str
    line: int


@dataclass(frozen=True)
class Part:
    size: int = field(metadata=key("size_bytes"))
    name: str = field(metadata=key(convert=or_none))
    rows: Any = field(metadata=LEFT_OUT)
    place: Place = field(metadata=inline())
    module: str | None = field(metadata=inline(lambda name: {"module": name, "is_inside": name is not None}))
    share: float = 0.5


@dataclass(frozen=True)
class _Inner:
    ratio: float
    text: str | None


@dataclass(frozen=True)
class _Outer:
    count: int = field(metadata=key("count_bytes"))
    name: str = field(metadata=key(convert=or_none))
    inner: _Inner = field(metadata=inline())
    rows: tuple[_Inner, ...]
    sizes: dict[str, int]
    odd: int = field(metadata=key(convert=str))


def test_keys_are_the_fields_in_their_order() -> None:
    """Another name, nothing for an empty text, no key for what is left out, and inlined keys in their place."""
    assert list(to_json(Part(8, "", object(), Place("a.py", 3), None)).items()) == [
        ("size_bytes", 8),
        ("name", None),
        ("file", "a.py"),
        ("line", 3),
        ("module", None),
        ("is_inside", False),
        ("share", 0.5),
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None),
        (-math.inf, None),
        (np.float64("nan"), None),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (Kind.FULL, "full"),
        (None, None),
        (True, True),
        ({3: (1, math.inf)}, {"3": [1, None]}),
        ((Place("a", 1), [np.int8(2)]), [{"file": "a", "line": 1}, [2]]),
    ],
)
def test_values_become_what_json_has(value: Any, expected: Any) -> None:
    """Equal, and of the type that JSON reads back."""
    found = to_json(value)
    assert found == expected
    assert type(found) is type(expected)
    assert json.loads(json.dumps(found, allow_nan=False)) == expected


def test_an_unknown_object_is_left_to_json() -> None:
    """What is no container stays as it is: ``json.dump`` refuses it by name."""
    with pytest.raises(TypeError, match="object"):
        json.dumps(to_json(Part(1, "a", None, Place("a", object()), "m")))  # type: ignore[arg-type]


def test_the_schema_of_a_dataclass_allows_what_is_written_of_it() -> None:
    """With the same keys, of the types of its fields; a converted value may be anything, an unknown one null."""
    schema = fields_schema(_Outer)
    value = to_json(_Outer(1, "", _Inner(0.5, None), (_Inner(float("nan"), "x"),), {"a": 2}, 3))
    jsonschema.validate(value, schema)
    assert list(schema["properties"]) == list(value) == ["count_bytes", "name", "ratio", "text", "rows", "sizes", "odd"]
    assert schema["properties"]["name"] == {"type": ["null", "string"]}
    assert schema["properties"]["rows"]["items"]["properties"]["ratio"] == {"type": ["null", "number"]}
    assert schema["properties"]["sizes"]["additionalProperties"] == {"type": "integer"}
    assert schema["properties"]["odd"] == {}
    for name, wrong in (("count_bytes", "1 B"), ("rows", {}), ("sizes", {"a": "b"})):
        assert not jsonschema.Draft202012Validator(schema).is_valid({**value, name: wrong})
