"""scipy's linear and mixed-integer solvers, with their output kept off standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scipy.optimize import linprog, milp

_STDOUT, _STDERR = 1, 2


def solve(*arguments: Any, **settings: Any) -> Any:
    """Calls ``scipy.optimize.milp``.

    HiGHS occasionally prints numerics messages to the process's standard output, bypassing Python and ``disp=False``;
    they are redirected to standard error, so that a command's output stays machine-readable.
    """
    with _stdout_on_stderr():
        return milp(*arguments, **settings)


def solve_linear(*arguments: Any, **settings: Any) -> Any:
    """Calls ``scipy.optimize.linprog``, with its output redirected as in ``solve``."""
    with _stdout_on_stderr():
        return linprog(*arguments, **settings)


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    try:
        os.fstat(_STDERR)
        kept = os.dup(_STDOUT)
    except OSError:  # a process without standard streams has nothing to redirect
        yield
        return
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
        os.dup2(_STDERR, _STDOUT)
        yield
    finally:
        os.dup2(kept, _STDOUT)
        os.close(kept)
