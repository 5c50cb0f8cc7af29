"""scipy's linear and mixed-integer solvers, with their output discarded."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memprof.trace.schema import Floats, Ints

_STDOUT = 1


def solve(
    cost: Floats, rules: Sequence[tuple[Any, Any, Any]], bounds: tuple[Any, Any], whole: Ints, **options: Any
) -> Any:
    """Solves a mixed-integer problem with ``scipy.optimize.milp``, whose result is returned.

    HiGHS occasionally prints numerics messages to the process's standard output, bypassing Python and ``disp=False``;
    they mean nothing to a reader and are discarded, so that a command's output stays machine-readable.

    Args:
        cost: Cost of each variable, to be minimised, shape ``(variables,)``.
        rules: Matrices of shape ``(rows, variables)``, each with the least and the most of its product with the
            variables.
        bounds: The least and the most of each variable.
        whole: 1 for each variable that is an integer, 0 for the others.
        **options: Options of the solver.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import, and most commands solve nothing

    constraints = [LinearConstraint(*rule) for rule in rules]
    settings: Any = options
    with _discarded_stdout():
        return milp(cost, constraints=constraints, bounds=Bounds(*bounds), integrality=whole, options=settings)


def solve_linear(*arguments: Any, **settings: Any) -> Any:
    """Calls ``scipy.optimize.linprog``, with its output discarded as in ``solve``."""
    from scipy.optimize import linprog  # see ``solve``

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
