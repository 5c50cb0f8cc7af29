"""scipy's linear and mixed-integer solvers, with their output discarded."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scipy.optimize import linprog, milp

_STDOUT = 1


def solve(*arguments: Any, **settings: Any) -> Any:
    """Calls ``scipy.optimize.milp``.

    HiGHS occasionally prints numerics messages to the process's standard output, bypassing Python and ``disp=False``;
    they mean nothing to a reader and are discarded, so that a command's output stays machine-readable.
    """
    with _discarded_stdout():
        return milp(*arguments, **settings)


def solve_linear(*arguments: Any, **settings: Any) -> Any:
    """Calls ``scipy.optimize.linprog``, with its output discarded as in ``solve``."""
    with _discarded_stdout():
        return linprog(*arguments, **settings)


@contextmanager
def _discarded_stdout() -> Iterator[None]:
    try:
        kept = os.dup(_STDOUT)
    except OSError:  # a process without standard output has nothing to redirect
        yield
        return
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), _STDOUT)
        yield
    finally:
        os.dup2(kept, _STDOUT)
        os.close(kept)
