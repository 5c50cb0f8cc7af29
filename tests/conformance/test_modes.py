"""A job's own modes and tensor subclasses see the same calls, in the same order, as without memprof."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.running import MODES, Job, run_both, with_plain_run


@with_plain_run("modes")
@pytest.mark.parametrize(
    "way", [pytest.param("record", marks=pytest.mark.slow), pytest.param("light", marks=pytest.mark.slow), "all"]
)
def test_modes_see_the_same_calls(way: str, tmp_path: Path) -> None:
    """Each call of torch's functions and operators is listed, and the lists are equal."""
    options = MODES.get(way, ("--skip", "3", "--steps", "9"))
    without, under = run_both(tmp_path, Job(("counts_calls.py",)), options)
    assert without.returncode == 0, without.stderr.decode()
    assert under.stderr.decode() == without.stderr.decode()
    assert under.stdout.decode() == without.stdout.decode()
    assert under.returncode == 0
