"""All policies, in the fixed order in which they are predicted and applied."""

from __future__ import annotations

import importlib
from functools import cache

from memprof.policies.base import Policy

#: The policies' folders, in their order. Policies that change sizes come first, then those that change lifetimes, then
#: those that run different code: checkpoint frees what precision left, swap moves what checkpoint kept.
_FOLDERS = (
    "shard",
    "precision",
    "accumulate",
    "loss",
    "checkpoint",
    "swap",
    "compress",
    "optimizer",
    "compile",
    "remat",
    "allocator",
)


@cache
def policy_types() -> tuple[type[Policy], ...]:
    """Returns the policies in their order: of each folder the one class that its ``policy.py`` defines."""
    return tuple(_policy_in(folder) for folder in _FOLDERS)


def _policy_in(folder: str) -> type[Policy]:
    module = importlib.import_module(f"memprof.policies.{folder}.policy")
    kinds = [
        value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__
    ]
    (kind,) = (each for each in kinds if issubclass(each, Policy))
    return kind


def policy_type(name: str) -> type[Policy] | None:
    """Returns the policy with this name, None if there is none."""
    return next((kind for kind in policy_types() if kind.name == name), None)


@cache
def default_policies() -> tuple[str, ...]:
    """Returns the names of the policies that a search uses where the user names none.

    These keep the numerics up to rounding and can be applied to an unmodified job. Where nothing fits with them, remat
    is tried.
    """
    return tuple(kind.name for kind in policy_types() if kind.tried_by_default)
