"""Rejects plans that a dry run cannot apply: those that depend on real memory use and timing."""

from __future__ import annotations

from memprof.launch.parent.target import CannotStartError
from memprof.policies.plan.plan import Plan


def check_plan(plan: Plan | None) -> None:
    """Rejects a plan that a dry run would not apply as a real run does.

    Raises:
        CannotStartError: The plan contains such a policy; the message names it.
    """
    policies = plan.policies if plan is not None else ()
    for policy in policies:
        if policy.dry_refusal:
            raise CannotStartError(f"a dry run cannot apply {policy.describe()}: {policy.dry_refusal}")
