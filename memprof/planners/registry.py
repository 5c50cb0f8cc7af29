"""All planners."""

from __future__ import annotations

import difflib
import importlib

from memprof.errors import UsageError
from memprof.planners.base import Planner

#: Every planner in the order of tables: ``module:class``, imported on first use, or the class itself. One more planner
#: needs a line here and nothing else.
PLANNERS: list[str | type[Planner]] = [
    "memprof.planners.published.sqrt:Sqrt",
    "memprof.planners.published.selective:Selective",
    "memprof.planners.published.bptt:Bptt",
    "memprof.planners.published.chain:Chain",
    "memprof.planners.published.checkmate:Checkmate",
    "memprof.planners.published.dtr:Dtr",
    "memprof.planners.published.knapsack:Knapsack",
    "memprof.planners.published.swap:SwapOut",
    "memprof.planners.published.auto:Auto",
]


def planner_types() -> tuple[type[Planner], ...]:
    """Returns the planners in the order of tables."""
    return tuple(_imported(one) if isinstance(one, str) else one for one in PLANNERS)


def _imported(place: str) -> type[Planner]:
    module, _, name = place.partition(":")
    kind: type[Planner] = getattr(importlib.import_module(module), name)
    assert issubclass(kind, Planner), f"{place} is not a planner"
    return kind


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
