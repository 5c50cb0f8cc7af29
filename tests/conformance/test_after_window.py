"""The promise of conformance holds where a step is recorded after the default window, because its inputs are larger."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.trace.schema import Steps
from memprof.trace.store import Trace
from tests.conformance.running import Job, run_both

#: What the job does in the larger steps, 10 and 14, or after them. Of these, what `make test` runs.
_QUICK = ("modes", "error")
_WHAT = ("modes", "error", "backward", "signal", "stack", "profiler", "thread")
#: No window is asked for.
_DEFAULT: tuple[str, ...] = ()


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=[] if what in _QUICK else [pytest.mark.slow, *[pytest.mark.cold] * (what == "signal")])
        for what in _WHAT
    ],
)
def test_behaves_as_without_memprof(what: str, tmp_path: Path) -> None:
    """Exit status or signal, stdout, stderr and files are those of the plain run, and the larger step is recorded."""
    without, under = run_both(tmp_path, Job(("grows.py", what)), _DEFAULT)
    assert under.stderr.decode(errors="replace") == without.stderr.decode(errors="replace")
    assert under.stdout.decode(errors="replace") == without.stdout.decode(errors="replace")
    assert under == without
    assert 10 in Trace.open(tmp_path / "run.memprof").table(Steps).step
