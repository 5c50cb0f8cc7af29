"""Converts the patterns of a plan for a wrapped model to those for the model inside."""

from __future__ import annotations

import dataclasses
from typing import Any

from memprof.policies.base import Policy
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.model_names import without_wrappers


def fitted(plan: Plan, names: set[str]) -> Plan:
    """Returns a plan with patterns for the model inside, converted from patterns for the wrapped model.

    Args:
        plan: The plan.
        names: Names of the modules of the model inside; one that is called ``module`` itself keeps its name.
    """
    return dataclasses.replace(plan, policies=tuple(_fitted(policy, names) for policy in plan.policies))


def _fitted(policy: Policy, names: set[str]) -> Policy:
    patterns = getattr(policy, "modules", ())
    if not isinstance(patterns, tuple):
        return policy
    inner = tuple(pattern if pattern.partition(".")[0] in names else without_wrappers(pattern) for pattern in patterns)
    changes: dict[str, Any] = {"modules": inner}
    return policy if inner == patterns else dataclasses.replace(policy, **changes)  # type: ignore[type-var]
