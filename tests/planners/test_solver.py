"""The solver prints nothing to standard output."""

from __future__ import annotations

import os

import numpy as np
import pytest
from scipy import optimize

from memprof.planners.graph import solver


def test_what_the_solver_prints_is_discarded(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line written past Python to the process's output while it solves is nowhere; later lines are."""

    def chatters(*_: object, **__: object) -> str:
        os.write(1, b"HighsMipSolverData says something\n")
        return "solved"

    monkeypatch.setattr(optimize, "milp", chatters)
    assert solver.solve(np.zeros(1), [], (0, 1), np.zeros(1)) == "solved"
    os.write(1, b"the answer\n")
    told = capfd.readouterr()
    assert told.out == "the answer\n"
    assert not told.err
