"""A forked child of a recorded job ends as it would without memprof, in whichever way and wherever it was forked."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import running

WAYS = {"window": running.WINDOW, "light": ("--light",), "remat": (*running.WINDOW, "--remat", "1GiB")}
PLACES = ("before", "first", "within", "backward", "after")
WORK = ("nothing", "trains", "profiles", "forks", "raises")
_QUICK = ("forks_and_ends.py within trains window",)


def _cases() -> list[Any]:
    words = [f"forks_and_ends.py {place} {work}" for place, work in product(PLACES, WORK)]
    cases = [f"{word} {way}" for word, way in product([*words, "forks_and_ends.py last nothing"], ("window", "light"))]
    cases += [f"forks_workers.py {way}" for way in WAYS] + ["forks_and_ends.py within trains remat"]
    return [pytest.param(case, id=case, marks=[] if case in _QUICK else [pytest.mark.slow]) for case in cases]


@pytest.mark.parametrize("case", _cases())
def test_children_end_as_without_memprof(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parent and child print and end as in the plain run; a child that hangs fails this by the time allowed."""
    *words, way = case.split()
    start = (sys.executable, "-P", "-m", "memprof.cli.main", "record", "-q", "-o", "run.memprof")
    monkeypatch.setattr(running, "MEMPROF", (*start, *WAYS[way]))
    without, under = running.run_both(tmp_path, tuple(words))
    assert without.returncode == 0, without.stderr.decode()
    assert under.stderr.decode() == without.stderr.decode()
    assert under.stdout.decode() == without.stdout.decode()
    assert under.files == without.files
    assert under.returncode == 0
