"""Which policies may be applied to a job in the middle of training, and to which of its modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from memprof.errors import PolicyError
from memprof.planners.search.workbench import allowed_names
from memprof.policies.base import Policy
from memprof.policies.plan.inside_wrappers import fitted
from memprof.policies.plan.patterns import match_modules
from memprof.policies.plan.plan import Plan
from memprof.policies.registry import policy_types


def live_policies(allow: tuple[str, ...], forbid: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of the usable policies.

    Args:
        allow: Names of the allowed policies; none for those that are ``tried_live``.
        forbid: Names of the forbidden policies.

    Raises:
        PolicyError: Unknown policy, or one that cannot be applied in the middle of training.
    """
    default = tuple(kind.name for kind in policy_types() if kind.tried_live)
    names = allowed_names(allow, forbid, default)
    for kind in policy_types():
        if kind.name in names and kind.live_refusal:
            raise PolicyError(
                f"{kind.name} cannot be applied in the middle of training: {kind.live_refusal}. Find a plan with "
                "memprof fit, and apply it before the first step with memprof.apply."
            )
    if not names:
        raise PolicyError("no policy is left; allow one, or forbid fewer.")
    return tuple(sorted(names))


def plan_for(plan: Plan, model_type: str, names: Iterable[str]) -> Plan:
    """Translates a plan's module patterns to the model's own names.

    In a recording of several models, the name of a module begins with its model's type.

    Args:
        plan: A plan with patterns from a recording.
        model_type: Type of the model.
        names: Qualified names of its modules.

    Raises:
        PolicyError: A pattern matches no module of this model.
    """
    known = list(names)
    inside = fitted(plan, set(known))
    policies = tuple(_policy_for(policy, model_type, known) for policy in inside.policies)
    return Plan(policies, budget_bytes=plan.budget_bytes)


def _policy_for(policy: Policy, model_type: str, names: list[str]) -> Policy:
    patterns = getattr(policy, "modules", None)
    if not patterns:
        return policy
    changes: dict[str, Any] = {"modules": tuple(_pattern_for(pattern, model_type, names) for pattern in patterns)}
    return replace(policy, **changes)  # type: ignore[type-var]  # every policy is a dataclass


def _pattern_for(pattern: str, model_type: str, names: list[str]) -> str:
    head, _, rest = pattern.partition(".")
    own = rest if rest and head.partition("#")[0] == model_type else pattern
    match_modules([own], names)
    return own
