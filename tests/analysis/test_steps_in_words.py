"""How recorded steps differ, in words."""

from __future__ import annotations

from memprof.analysis.report.notes import describe_peaks, describe_steps

_MIB = 1024**2


def test_steps_that_are_alike_need_no_words() -> None:
    """Nor does a single step, nor a difference of a few bytes."""
    assert describe_steps({}) == describe_steps({3: _MIB}) == ""
    assert describe_steps({2: 50 * _MIB, 3: 50 * _MIB + 12, 4: 50 * _MIB}) == ""


def test_few_steps_are_told_one_by_one() -> None:
    """In the order they ran in, in one unit."""
    assert describe_steps({2: 84 * _MIB, 3: 31 * _MIB, 4: 10_434_000}) == "steps 2 to 4: 84.00, 31.00, 9.95 MiB"
    assert describe_steps({2: _MIB, 3: 2 * _MIB}) == "steps 2 and 3: 1.00, 2.00 MiB"
    assert describe_steps({2: 100, 5: 200, 9: 300}) == "steps 2, 5 and 9: 100, 200, 300 B"


def test_many_steps_are_told_by_their_ends() -> None:
    """The least, the most, and where the middle lies."""
    sizes = [number * _MIB for number in range(10, 110, 10)]
    assert describe_peaks(sizes) == "10.00 MiB to 100.00 MiB, half of them at most 50.00 MiB"
    words = describe_steps(dict(enumerate(sizes, start=2)))
    assert words == "steps 2 to 11: 10.00 MiB to 100.00 MiB, half of them at most 50.00 MiB"
