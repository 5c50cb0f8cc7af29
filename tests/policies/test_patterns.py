"""Patterns of module names."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.errors import PolicyError
from memprof.policies.plan.patterns import condensed, match_modules, outermost

NAMES = ["", "embed", "layers", "layers.0", "layers.0.mlp", "layers.0.mlp.0", "layers.1", "layers.10", "layers.10.mlp"]


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("embed", ["embed"]),
        ("layers.*", ["layers.0", "layers.1", "layers.10"]),
        ("layers.?", ["layers.0", "layers.1"]),
        ("layers.[0-1]", ["layers.0", "layers.1"]),
        ("layers.[!0]", ["layers.1"]),
        ("layers.*.mlp", ["layers.0.mlp", "layers.10.mlp"]),
        ("**.mlp", ["layers.0.mlp", "layers.10.mlp"]),
        ("**.embed", ["embed"]),
        ("layers.**", ["layers.0", "layers.0.mlp", "layers.0.mlp.0", "layers.1", "layers.10", "layers.10.mlp"]),
        ("*", ["embed", "layers"]),
        ("**", NAMES[1:]),
        ("", [""]),
        (".", [""]),
    ],
)
def test_stars_know_of_dots(pattern: str, matched: list[str]) -> None:
    """One star and a question mark stay within a part of the name, two stars span parts; a dot is the model itself."""
    assert match_modules([pattern], NAMES) == matched


def test_a_name_is_chosen_once_and_in_the_models_order() -> None:
    """However many patterns match it, in whatever order they are given."""
    assert match_modules(["layers.1", "layers.?"], NAMES) == ["layers.0", "layers.1"]


def test_a_pattern_without_a_match_names_near_ones() -> None:
    """Each pattern must match something: a typing error would else leave a plan half applied."""
    with pytest.raises(PolicyError, match=r"no module of the model matches 'layer\.0'; did you mean layers\.0"):
        match_modules(["embed", "layer.0"], NAMES)
    with pytest.raises(PolicyError, match=r"matches 'zzz'; it has embed, layers, layers\.\*"):
        match_modules(["zzz"], NAMES)
    with pytest.raises(PolicyError, match="no modules"):
        match_modules(["x"], [])


@given(st.text(alphabet="ab.*?[]!-^\\()+$|", max_size=8))
def test_any_text_is_a_pattern(pattern: str) -> None:
    """Any pattern results in names or an error message."""
    with contextlib.suppress(PolicyError):
        assert set(match_modules([pattern], NAMES)) <= set(NAMES)


def test_what_lies_inside_another_is_left_out() -> None:
    """A module inside a chosen one is part of it."""
    assert outermost(["layers.0", "layers.0.mlp", "layers.10.mlp", "layers.1"]) == [
        "layers.0",
        "layers.10.mlp",
        "layers.1",
    ]
    assert outermost(["", "embed"]) == [""]


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (("layers.0", "layers.1", "layers.2", "head"), "layers.0-2, head"),
        (("layers.9", "layers.10", "layers.11.mlp"), "layers.9-10, layers.11.mlp"),
        (("a.0.mlp", "a.1.mlp", "a.3.mlp"), "a.{0-1,3}.mlp"),
        (("stages.1", "stages.0"), "stages.0-1"),
        (("0", "1"), "0-1"),
        (("a.0.b.2", "a.1.b.2", "a.3.b.2", "a.3.b.3"), "a.{0-1,3}.b.2, a.3.b.3"),
        (("layers.*", "**.norm"), "layers.*, **.norm"),
        ((".",), "the whole model"),
        (("h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp", "h.2.mlp", "head"), "h.0-1.attn, h.0-2.mlp, head"),
        (("0.0", "0.1", "1.0", "1.1"), "0.0-1, 1.0-1"),
        ((), ""),
    ],
)
def test_names_that_count_up_are_said_in_one(patterns: tuple[str, ...], words: str) -> None:
    """In any order, and also where others stand between them."""
    assert condensed(patterns) == words
