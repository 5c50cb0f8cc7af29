"""Predictions of remat compared with runs: in a separate process, where nothing else holds memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_predictions_meet_runs_where_nothing_else_holds_memory() -> None:
    """Remat counts what the whole process holds: what the tests of others hold would be counted against a budget."""
    tests = str(Path("tests") / "policies" / "apart" / "remat_predicted.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "", tests],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
