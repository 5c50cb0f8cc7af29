"""What is looked at, as it stands in the address and in the browser's stores."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("dash")

from hypothesis import given
from hypothesis import strategies as st

from memprof_dashboard.pages import PAGES
from memprof_dashboard.state import View

NUMBERS = st.integers(-1, 2**53 - 1)
TEXTS = st.text(max_size=60)
VIEWS = st.builds(
    View,
    trace=NUMBERS,
    rank=NUMBERS,
    tab=st.sampled_from(list(PAGES)),
    first=NUMBERS,
    end=NUMBERS,
    at=NUMBERS,
    other=NUMBERS,
    storage=NUMBERS,
    find=TEXTS.filter(lambda text: not any("\ud800" <= letter <= "\udfff" for letter in text)),
    budget=st.from_regex(r"[0-9]{1,5}(\.[0-9])?(GiB|%|)", fullmatch=True),
)


@given(view=VIEWS)
def test_the_address_and_the_store_restore_a_view(view: View) -> None:
    """Whatever is looked at comes back from both."""
    assert View.from_search(view.to_search()) == view
    assert View.from_json(view.to_json()) == view


def test_defaults_are_left_out_of_the_address() -> None:
    """The first view has no address but the page's."""
    assert View().to_search() == ""
    assert View(at=3, find="a b&c").to_search() == "?at=3&find=a+b%26c"


@given(search=st.one_of(st.text(max_size=300), st.builds("?at={}&first={}".format, st.text(), st.integers())))
def test_any_address_gives_a_view(search: str) -> None:
    """Nothing that can be typed is a fault, and all fields are sound."""
    view = View.from_search(search)
    assert View.from_json(view.to_json()) == view


@pytest.mark.parametrize(
    ("search", "view"),
    [
        ("?at=7&at=8", View(at=8)),
        ("?at=-2", View()),
        ("?at=1e3", View()),
        ("?at=--5", View()),
        ("?at=٣", View()),
        ("?at=99999999999999999999", View()),
        ("?tab=" + "x" * 201 + "&at=4", View(at=4)),
        ("?nothing=1&self=2", View()),
        ("?find=" + "x" * 201, View()),
        (None, View()),
        (5, View()),
    ],
)
def test_what_makes_no_sense_takes_its_default(search: Any, view: View) -> None:
    """Numbers that are none or too large, unknown names, overlong texts."""
    assert View.from_search(search) == view


@pytest.mark.parametrize("fields", [None, [], "x", {"at": True}, {"at": 1.5}, {"at": "3"}, {"tab": 3}, {"find": None}])
def test_stores_that_make_no_sense(fields: Any) -> None:
    """A browser can send anything."""
    assert View.from_json(fields) == View()


def test_a_change_that_makes_no_sense_changes_nothing() -> None:
    """Unknown fields and unsound values stay out."""
    view = View(at=3)
    assert view.change(at="x", tab=3, self=1, name=2) == view
    assert view.change(at=4, tab="blocks") == View(at=4, tab="blocks")
