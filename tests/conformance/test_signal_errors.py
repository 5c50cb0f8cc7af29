"""An error that a signal handler of the job raises while the recorder works reaches the job."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.running import ALL_STEPS, Job, start_under

_WAYS = {"record": ALL_STEPS, "light": ("--light",)}
#: Which call of the recorder's, counted from the job's first step, the handler interrupts.
_CALLS = (1, 9, 20, 60, 150, 333, 700, 1500)
_QUICK = (("record", 60), ("light", 20))


def _cases() -> list[Any]:
    cases = product(_WAYS, _CALLS)
    return [pytest.param(*case, marks=[] if case in _QUICK else [pytest.mark.slow]) for case in cases]


@pytest.mark.parametrize(("way", "call"), _cases())
def test_an_error_of_a_signal_handler_reaches_the_job(way: str, call: int, tmp_path: Path) -> None:
    """The job catches it and ends in order; sessions of the profiler that were begun are ended."""
    under = start_under(tmp_path / "job", Job(("signal_errors.py", str(call))), tmp_path / "run.memprof", _WAYS[way])
    outcome = under.finish()
    assert outcome.returncode == 0, outcome.stderr.decode()
    assert outcome.stdout == b"done\n"
    assert outcome.stderr == b"raised\ncaught\n"
