"""A forked child of a recorded job ends as it would without memprof, in whichever way and wherever it was forked."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.running import MODES, Job, run_both, with_plain_run

PLACES = ("before", "first", "within", "backward", "after")
WORK = ("nothing", "trains", "profiles", "forks", "raises")
#: What `make test` runs, in forks of a process that has imported torch; the others end as only a new process does.
_QUICK = ("forks_and_ends.py within trains record",)


def _cases() -> list[Any]:
    words = [f"forks_and_ends.py {place} {work}" for place, work in product(PLACES, WORK)]
    cases = [f"{word} {way}" for word, way in product([*words, "forks_and_ends.py last nothing"], ("record", "light"))]
    cases += [f"forks_workers.py {way}" for way in ("record", "light", "remat")] + [
        "forks_and_ends.py within trains remat"
    ]
    return [
        pytest.param(
            case,
            id=case,
            marks=[
                with_plain_run(case.rpartition(" ")[0]),
                *([] if case in _QUICK else [pytest.mark.slow, pytest.mark.cold]),
            ],
        )
        for case in cases
    ]


@pytest.mark.parametrize("case", _cases())
def test_children_end_as_without_memprof(case: str, tmp_path: Path) -> None:
    """Parent and child print and end as in the plain run; a child that hangs fails this by the time allowed."""
    *words, way = case.split()
    without, under = run_both(tmp_path, Job(tuple(words)), MODES[way])
    assert without.returncode == 0, without.stderr.decode()
    assert under.stderr.decode() == without.stderr.decode()
    assert under.stdout.decode() == without.stdout.decode()
    assert under.files == without.files
    assert under.returncode == 0
