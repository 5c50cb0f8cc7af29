"""A plan in the names that the model itself has, where the recording it is from has longer ones."""

from __future__ import annotations

import dataclasses
from typing import Any

from memprof.policies.base import Policy
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.wrappers import WRAPPERS, fitted


def in_own_names(plan: Plan) -> Plan:
    """Returns a plan whose patterns are as the model that it was predicted for has them.

    Of a job with a wrapped model a recording has ``module.`` in front of names, and of one with several models the
    type of each; memprof knows both when it applies a plan, code that is written does not.
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
