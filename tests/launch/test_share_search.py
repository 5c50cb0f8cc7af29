"""The shares that are tried until the largest that fits is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.launch.dry.dry_compiled import search_shares

_BUDGET = 1000


def tried(peak: Callable[[float], int], kept_bytes: int = 0) -> dict[float, int]:
    """Returns the peaks of the shares that the search tries, in order."""
    shares = search_shares(_BUDGET, kept_bytes)
    found: dict[float, int] = {}
    share = next(shares)
    while True:
        found[share] = peak(share)
        try:
            share = shares.send(found[share])
        except StopIteration:
            return found


def test_a_job_that_fits_is_run_once() -> None:
    """The whole is tried first."""
    assert tried(lambda share: 1000) == {1.0: 1000}


def test_an_even_fall_needs_one_more_run_where_what_is_kept_is_known() -> None:
    """The line meets the budget at a share of 0.64; with 970 bytes, that plan is kept."""
    assert tried(lambda share: round(400 + 900 * share), 900) == {1.0: 1300, 0.63: 967}


def test_an_unknown_fall_is_halved_first() -> None:
    """Then the line through the two nearest peaks is followed."""
    found = tried(lambda share: round(400 + 900 * share))
    assert list(found)[:2] == [1.0, 0.5]
    assert len(found) == 3
    assert max(peak for peak in found.values() if peak <= _BUDGET) >= 950


def test_zero_is_tried_last_where_nothing_fits() -> None:
    """In four runs, whatever was expected."""
    for kept in (0, 500, 5000):
        found = list(tried(lambda share: round(1500 + 100 * share), kept))
        assert found[-1] == 0.0
        assert len(found) <= 5


def test_shares_below_a_small_rise_are_tried() -> None:
    """A larger share had a slightly lower peak; the largest that fits is far below."""
    found = tried(lambda share: 1300 + round(10 * (1 - share)) if share > 0.3 else 900)
    assert min(found.values()) == 900


@given(st.lists(st.integers(1, 3000), min_size=11, max_size=11), st.integers(0, 4000), st.integers(1, 3000))
def test_a_peak_that_rises_and_falls_ends_the_search(peaks: list[int], kept: int, whole: int) -> None:
    """No share is tried twice; the last one that fits is near the budget, or just below one that does not fit."""
    found = tried(lambda share: whole if share == 1.0 else peaks[int(10 * share)], kept)
    shares = list(found)
    assert shares[0] == 1.0
    assert len(shares) <= 20
    fitting = [share for share in shares if found[share] <= _BUDGET]
    if not fitting:
        assert shares[-1] == 0.0
        return
    largest = max(fitting)
    above = [share for share in shares if share > largest]
    assert found[largest] >= 0.95 * _BUDGET or not above or min(above) - largest <= 0.11


@pytest.mark.parametrize("kept", [0, 700, 2000])
def test_the_largest_that_fits_is_found_in_few_runs_where_the_peak_falls(kept: int) -> None:
    """As fast as halving, or faster, for peaks that fall evenly, steeply at first, or steeply at last."""
    for power in (0.5, 1.0, 2.0):
        found = tried(lambda share, power=power: round(300 + 1200 * share**power), kept)  # type: ignore[misc]
        assert len(found) <= 5
        assert max(peak for peak in found.values() if peak <= _BUDGET) >= 850
