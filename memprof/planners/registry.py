"""All planners."""

from __future__ import annotations

import difflib
from functools import cache

from memprof.errors import UsageError
from memprof.planners.base import Planner


@cache
def planner_types() -> tuple[type[Planner], ...]:
    """Returns the planners in the order of tables."""
    from memprof.planners.published.auto import Auto
    from memprof.planners.published.bptt import Bptt
    from memprof.planners.published.chain import Chain
    from memprof.planners.published.checkmate import Checkmate
    from memprof.planners.published.dtr import Dtr
    from memprof.planners.published.knapsack import Knapsack
    from memprof.planners.published.selective import Selective
    from memprof.planners.published.sqrt import Sqrt
    from memprof.planners.published.swap import SwapOut

    return Sqrt, Selective, Bptt, Chain, Checkmate, Dtr, Knapsack, SwapOut, Auto


def planner_type(name: str) -> type[Planner] | None:
    """Returns the planner with a name; None for an unknown name."""
    return next((kind for kind in planner_types() if kind.name == name), None)


def named_planner(name: str) -> type[Planner]:
    """Returns the planner with a name.

    Raises:
        UsageError: The name is unknown.
    """
    kind = planner_type(name)
    if kind is None:
        names = [one.name for one in planner_types()]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"give one of {', '.join(names)}."
        raise UsageError(f"unknown planner {name!r}: {hint}")
    return kind
