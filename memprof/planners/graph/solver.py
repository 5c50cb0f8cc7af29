"""scipy's mixed-integer solver, with its own chatter kept out of what a command prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scipy.optimize import milp

_STDOUT, _STDERR = 1, 2


def solve(*arguments: Any, **settings: Any) -> Any:
    """Calls ``scipy.optimize.milp``.

    HiGHS now and then prints a line about its own numerics to the process's standard output, past Python and past
    ``disp=False``; it goes to standard error here, so that what a command prints can be read by programs.
    """
    with _stdout_on_stderr():
        return milp(*arguments, **settings)


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    try:
        os.fstat(_STDERR)
        kept = os.dup(_STDOUT)
    except OSError:  # a process without standard streams has nothing to keep apart
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
