"""The coverage of intervals: how it is counted."""

from __future__ import annotations

import pytest

from lab.benchmarks.intervals import COLUMNS, Pair, section_of


def test_what_is_outside_is_named_and_counted():
    """A measured peak at an end is inside; what the run refused counts as predicted alone."""
    pairs = [
        Pair("a", "--precision bf16", 980, 1000, 1000, 0.1),
        Pair("b", "--precision bf16", 980, 1000, 980),
        Pair("c", "--precision bf16", 980, 1000, 1100),
        Pair("d", "--precision bf16", 980, 1000, 0),
        Pair("a", "--swap *:disk", 500, 500, 500),
    ]
    section = section_of(pairs, [], 4)
    assert section.rows[0] == ("--precision bf16", "4", "2", "1", "0", "2.0%", "2.0%", "1", "+10% to +10%")
    assert section.rows[1] == ("--swap *:disk", "1", "1", "0", "0", "0.0%", "0.0%", "0", "")
    assert "3 of 4 (75.0%), 2.0%; outside: c under --precision bf16 (+10.0%)" in section.bar
    assert section.bar.endswith("NOT passed.")
    assert all(len(row) == len(COLUMNS) for row in section.rows)


@pytest.mark.parametrize(("failed", "width", "end"), [([], 20, ": passed."), (["x"], 20, "NOT"), ([], 60, "NOT")])
def test_the_bar_wants_coverage_that_is_not_wide_and_no_failure(failed, width, end):
    """Intervals of six per cent cover everything and pass nothing."""
    section = section_of([Pair("a", "one", 1000 - width, 1000, 990)], failed, 1)
    assert end in section.bar
