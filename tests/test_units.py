"""Bytes, durations and fractions as people write them, and dataclasses as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.errors import UsageError
from memprof.json_values import LEFT_OUT, fields_schema, inline, key, or_none, to_json
from memprof.units import (
    format_bytes,
    format_bytes_change,
    format_count,
    format_percent,
    format_percent_change,
    format_us,
    format_us_change,
    parse_bytes,
)

INT64 = st.integers(0, 2**63 - 1)


HALF_OF_LAST_DIGIT = 0.005


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1023.6, "1.00 KiB"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1024**2 - 1, "1.00 MiB"),  # 1023.999 KiB: the next unit, never "1024.00 KiB"
        (1_320_702_444, "1.23 GiB"),  # 1.23 x 2**30, rounded up
        (24 * 1024**3, "24.00 GiB"),
        (-4096, "-4.00 KiB"),
        (-0.2, "0 B"),
        (2**63 - 1, "8.00 EiB"),
    ],
)
def test_format_bytes(count: float, text: str) -> None:
    """Sizes are written in the largest binary unit that leaves a number of at least one."""
    assert format_bytes(count) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1_320_702_444, "+1.23 GiB"), (-512, "-512 B"), (1, "+1 B")])
def test_format_bytes_change(count: int, text: str) -> None:
    """A difference carries its sign, no difference carries none."""
    assert format_bytes_change(count) == text


@pytest.mark.parametrize(("change", "text"), [(1200.0, "+1.2 ms"), (-850.0, "-850 us"), (0.0, "0.0 us")])
def test_format_us_change(change: float, text: str) -> None:
    """A longer time carries a plus, no difference carries no sign."""
    assert format_us_change(change) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1024", 1024),
        ("512 B", 512),
        ("24GiB", 25_769_803_776),
        ("24 GB", 24_000_000_000),
        ("1.5MiB", 1_572_864),
        (" 1.5 mib ", 1_572_864),
        ("2kB", 2_000),
        ("2KB", 2_000),
        ("0.1 KiB", 102),  # 102.4: a budget never grows by rounding
        (".5KiB", 512),
        (f"{'0' * 5_000}1.{'0' * 5_000} kB", 1_000),
        ("7.999999999999 EiB", 9_223_372_036_853_622_886),  # 2**63 - 2**60 / 10**12, finer than a float
    ],
)
def test_parse_bytes(text: str, count: int) -> None:
    """Binary units are powers of 1024 and decimal ones powers of 1000, in any case, with or without a space."""
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "'' is not a size: write a number and a unit, such as 24GiB, 1.5 MiB or 80GB"),
        ("GiB", "'GiB' is not a size: write a number and a unit, such as 24GiB, 1.5 MiB or 80GB"),
        ("-1 GiB", "'-1 GiB' is not a size: write a number and a unit, such as 24GiB, 1.5 MiB or 80GB"),
        ("1e9", "'1e9' is not a size: write a number and a unit, such as 24GiB, 1.5 MiB or 80GB"),
        ("24G", "'24G' can be read in two ways: write GiB for powers of 1024 or GB for powers of 1000"),
        ("3 apples", "'3 apples' has the unknown unit 'apples': write B, KiB, MiB, GiB, TiB, kB, MB, GB or TB"),
        ("8 EiB", "'8 EiB' is more than any machine holds: sizes end at 8 EiB"),
    ],
)
def test_parse_bytes_says_what_is_wrong(text: str, sentence: str) -> None:
    """Invalid sizes are refused with a message that shows a valid one."""
    with pytest.raises(UsageError) as raised:
        parse_bytes(text)
    assert str(raised.value) == sentence


@given(INT64)
def test_bytes_as_numbers_survive(count: int) -> None:
    """A whole number of bytes is read back exactly, with its unit or without."""
    assert parse_bytes(str(count)) == count
    assert parse_bytes(f"{count} B") == count


@given(st.integers(0, 2**60))
def test_what_is_written_can_be_read(count: int) -> None:
    """A written size reads back as itself, give or take half of its last digit."""
    text = format_bytes(count)
    unit_bytes = parse_bytes(f"1 {text.rpartition(' ')[2]}")
    # The float division of the writer may add one part in 2**53.
    assert abs(parse_bytes(text) - count) <= HALF_OF_LAST_DIGIT * unit_bytes * (1 + 2**-40) + 1


@given(INT64)
def test_signs_mirror(count: int) -> None:
    """A decrease reads as the increase with the other sign."""
    assert format_bytes_change(-count) == format_bytes_change(count).replace("+", "-")


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text crashes the reader; what is read is a size that fits a table."""
    try:
        count = parse_bytes(text)
    except UsageError:
        return
    assert 0 <= count < 2**63


@pytest.mark.parametrize(
    ("duration_us", "text"),
    [
        (0, "0.0 us"),
        (3.44, "3.4 us"),
        (9.96, "10 us"),
        (850, "850 us"),
        (999.6, "1.0 ms"),
        (12_300, "12.3 ms"),
        (999_960, "1.0 s"),
        (1_200_000, "1.2 s"),
        (90_000_000, "90.0 s"),
        (-12_300, "-12.3 ms"),
        (math.nan, "unknown"),
    ],
)
def test_format_us(duration_us: float, text: str) -> None:
    """Durations are written in the unit that suits them; one that was not measured is unknown."""
    assert format_us(duration_us) == text


@pytest.mark.parametrize(("fraction", "text"), [(0.123, "12.3 %"), (0, "0.0 %"), (1, "100.0 %"), (-0.026, "-2.6 %")])
def test_format_percent(fraction: float, text: str) -> None:
    """Fractions are written as percentages with one decimal."""
    assert format_percent(fraction) == text


def test_changes_in_percent_have_a_sign() -> None:
    """Both signs are written, and a share of nothing is unknown."""
    assert [format_percent_change(one) for one in (0.123, -0.5, 0.0, math.nan)] == [
        "+12.3 %",
        "-50.0 %",
        "+0.0 %",
        "unknown",
    ]


@pytest.mark.parametrize(
    ("number", "nouns", "text"),
    [(1, ("plan",), "1 plan"), (0, ("plan",), "0 plans"), (1200, ("process", "processes"), "1,200 processes")],
)
def test_format_count(number: int, nouns: tuple[str, ...], text: str) -> None:
    """The noun is in the singular after one alone."""
    assert format_count(number, *nouns) == text


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
