"""Says which plans a dry run cannot apply: those that compile, for a dry run is eager."""

from __future__ import annotations

from memprof.launch.target import CannotStartError
from memprof.policies.plan import Plan

#: What a compiler makes of a module, and keeps for backward, is known only once it has compiled it.
_LEFT_OUT = ("compile",)


def check_plan(plan: Plan | None) -> None:
    """Refuses a plan that a dry run would not apply as a real run does.

    Raises:
        CannotStartError: It holds such a policy, which the sentence names.
    """
    policies = plan.policies if plan is not None else ()
    left = [policy.describe() for policy in policies if policy.name in _LEFT_OUT]
    if left:
        raise CannotStartError(
            f"a dry run cannot apply {', '.join(left)}: it runs operator by operator, and what a compiler makes of "
            "them is known only once it has. Leave it out of the dry run, or record a real run under the plan."
        )
