"""Translates a plan's module names to the model's own, where the recording has prefixed ones."""

from __future__ import annotations

import dataclasses
from typing import Any

from memprof.policies.base import Policy
from memprof.policies.plan.inside_wrappers import fitted
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.wrappers import WRAPPERS


def in_own_names(plan: Plan) -> Plan:
    """Returns a plan with the module names of the model it was predicted for.

    Recordings prefix names with ``module.`` for a wrapped model, and with the type for jobs with several models;
    memprof strips both when it applies a plan, emitted code does not.
    """
    model = plan.prediction.model if plan.prediction is not None else ""
    if model in WRAPPERS:
        return fitted(plan, set())
    if not model:
        return plan
    return dataclasses.replace(plan, policies=tuple(_without_type(each, f"{model}.") for each in plan.policies))


def _without_type(policy: Policy, prefix: str) -> Policy:
    patterns = getattr(policy, "modules", ())
    own = tuple(pattern.removeprefix(prefix) for pattern in patterns)
    changes: dict[str, Any] = {"modules": own}
    return policy if own == patterns else dataclasses.replace(policy, **changes)  # type: ignore[type-var]
