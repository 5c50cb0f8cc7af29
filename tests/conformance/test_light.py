"""The promise of conformance holds for ``memprof record --light`` as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.running import MODES, run_both, with_plain_run
from tests.conformance.test_conformance import CASES, Case

#: Where a light recording does something of its own inside the job: hooks, sessions, threads, forks, its end.
#: Of these, what `make test` runs; the others are left to `make test-all`.
_QUICK = ("fails_in_backward.py hook", "forks.py", "looks_at_modules.py")
_NAMES = (
    "compiles.py",
    "fails_in_backward.py",
    "forks.py",
    "holds_references.py",
    "interrupted.py",
    "looks_at_modules.py",
    "own_modes.py",
    "process_state.py",
    "runs_out_of_memory.py late",
    "runs_out_of_memory.py retried",
    "trains_in_thread.py",
    "warns_in_step.py",
)


def _marked(case: Case) -> Any:
    is_quick = any(name in " ".join(case.words) for name in _QUICK)
    marks = [with_plain_run(str(case)), *[pytest.mark.slow] * (not is_quick), *[pytest.mark.cold] * case.is_cold]
    return pytest.param(case, id=str(case), marks=marks)


@pytest.mark.parametrize(
    "case", [_marked(case) for case in CASES if any(name in " ".join(case.words) for name in _NAMES)]
)
def test_behaves_as_without_memprof(case: Case, tmp_path: Path) -> None:
    """Exit status or signal, stdout, stderr and files are those of the plain run, byte for byte."""
    without, under = run_both(tmp_path, case.job, MODES["light"])
    assert under.stderr.decode(errors="replace") == without.stderr.decode(errors="replace")
    assert under.stdout.decode(errors="replace") == without.stdout.decode(errors="replace")
    assert under == without
