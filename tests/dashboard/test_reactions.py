"""What clicks, keys and drags do to the view, on a recording small enough to work out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("dash")

from memprof_dashboard.sources import Rank
from memprof_dashboard.state import Shown, View, on_click, on_key, on_zoom, shown
from tests.building import Op, Storage, make_trace

SIZES = [100, 300, 200, 700, 500, 50, 60, 900, 20, 10]


@pytest.fixture(scope="module")
def rank() -> Rank:
    """Two steps of ten operators; each makes and frees one storage of SIZES bytes. Peaks are operators 7 and 17."""
    steps = [[Op(makes=[f"{at}"], frees=[f"{at}"]) for at in range(10)]] * 2
    return Rank(make_trace(steps, [Storage(f"{at}", size) for at, size in enumerate(SIZES)]))


@pytest.fixture(scope="module")
def nothing() -> Rank:
    return Rank(make_trace([[]], []))


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (View(), Shown(10, 20, 17)),
        (View(first=0, end=6), Shown(0, 6, 3)),
        (View(first=0, end=6, at=15), Shown(0, 6, 15)),
        (View(first=0, end=999), Shown(0, 20, 7)),
        (View(first=6, end=6), Shown(10, 20, 17)),
        (View(first=50, end=60), Shown(10, 20, 17)),
        (View(at=20), Shown(10, 20, 17)),
    ],
)
def test_what_a_view_shows(rank: Rank, view: View, expected: Shown) -> None:
    """The last whole step with the cursor at its peak, unless the view says something that can be shown."""
    assert shown(view, rank) == expected


@pytest.mark.parametrize(
    ("key", "is_shifted", "view", "expected"),
    [
        ("ArrowRight", False, View(at=4, first=0, end=10), (0, 10, 5)),
        ("ArrowLeft", False, View(at=0, first=0, end=10), (0, 10, 0)),
        ("ArrowRight", False, View(at=19, first=10, end=20), (10, 20, 19)),
        ("ArrowRight", False, View(at=9, first=0, end=10), (5, 15, 10)),
        ("ArrowRight", True, View(at=3, first=0, end=10), (8, 18, 13)),
        ("ArrowLeft", True, View(at=13, first=10, end=20), (0, 10, 3)),
        ("ArrowRight", True, View(at=13, first=10, end=20), (10, 20, 13)),
        ("p", False, View(at=1, first=0, end=6), (0, 6, 3)),
        ("q", False, View(at=2, first=0, end=4), (0, 4, 2)),
    ],
)
def test_keys(rank: Rank, key: str, is_shifted: bool, view: View, expected: tuple[int, int, int]) -> None:
    """Arrows and P, at the ends and in between."""
    assert shown(on_key(view, rank, key, is_shifted=is_shifted), rank) == Shown(*expected)


def test_escape_lets_go(rank: Rank) -> None:
    """Of the storage and of what was searched for, and of nothing else."""
    assert on_key(View(at=3, storage=2, find="x"), rank, "Escape", is_shifted=False) == View(at=3)


@pytest.mark.parametrize(
    ("relayout", "expected"),
    [
        ({"xaxis.range[0]": 2.4, "xaxis.range[1]": 8.6}, (2, 9)),
        ({"xaxis.range[0]": 8.6, "xaxis.range[1]": 2.4}, (2, 9)),
        ({"xaxis.range": [3, 12]}, (3, 12)),
        ({"xaxis.range": [-50, 500]}, (0, 20)),
        ({"xaxis.range": [5, 5.1]}, (4, 8)),
        ({"xaxis.range": [400, 500]}, (16, 20)),
        ({"xaxis.autorange": True}, (0, 20)),
    ],
)
def test_drags(rank: Rank, relayout: dict[str, Any], expected: tuple[int, int]) -> None:
    """The dragged range, in whole operators, within the recording, never fewer than four."""
    now = shown(on_zoom(View(at=1), rank, relayout), rank)
    assert (now.first, now.end) == expected


@pytest.mark.parametrize(
    "relayout",
    [
        {"autosize": True},
        {},
        {"xaxis.range": [math.nan, 3]},
        {"xaxis.range": [1, math.inf]},
        {"xaxis.range": 3},
        {"xaxis.range": [1, 2, 3]},
        {"xaxis.range": [10**400, 3]},
        {"dragmode": "pan"},
    ],
)
def test_what_is_no_drag_changes_nothing(rank: Rank, relayout: dict[str, Any]) -> None:
    """Resizing, panning and nonsense."""
    assert on_zoom(View(at=1), rank, relayout) == View(at=1)


@pytest.mark.parametrize(("x", "at"), [(0, 0), (5, 5), (5.9, 5), (-3, 0), (99, 9)])
def test_clicks(rank: Rank, x: float, at: int) -> None:
    """The operator under the pointer, at the edge the last one shown; the storage is let go."""
    view = View(first=0, end=10, storage=3)
    assert on_click(view, rank, {"points": [{"x": x}]}) == view.change(at=at, storage=-1)


@pytest.mark.parametrize("click", [{}, {"points": []}, {"points": [{"x": None}]}, {"points": [{"x": math.inf}]}])
def test_what_is_no_click_changes_nothing(rank: Rank, click: dict[str, Any]) -> None:
    """Clicks outside everything."""
    assert on_click(View(), rank, click) == View()


def test_nothing_happens_where_nothing_was_recorded(nothing: Rank) -> None:
    """No key, drag or click is a fault without operators."""
    view = View()
    assert shown(view, nothing) == Shown(0, 0, 0)
    for key in ("ArrowRight", "ArrowLeft", "p"):
        assert on_key(view, nothing, key, is_shifted=True) == view
    assert on_click(view, nothing, {"points": [{"x": 1}]}) == view
    assert shown(on_zoom(view, nothing, {"xaxis.range": [0, 5]}), nothing) == Shown(0, 0, 0)


def test_clicks_and_drags_on_an_axis_of_time(rank: Rank) -> None:
    """Milliseconds are turned into the operators that run then."""
    clock = rank.clock
    assert clock is not None
    view = View(axis="time", first=0, end=20)
    click = {"points": [{"x": (clock[4] + clock[5]) / 2}]}
    assert on_click(view, rank, click).at == 4
    zoomed = on_zoom(view, rank, {"xaxis.range": [clock[3], clock[9]]}, clock)
    assert (zoomed.first, zoomed.end) == (3, 9)
