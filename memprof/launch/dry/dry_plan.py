"""Rejects plans that a dry run cannot apply: those that compile or depend on real memory use and timing."""

from __future__ import annotations

from memprof.launch.parent.target import CannotStartError
from memprof.policies.plan.plan import Plan

#: Policies that a dry run cannot apply, with the reason.
_LEFT_OUT = {
    "compile": (
        "it runs operator by operator, and what a compiler makes of them is known only once it has. Leave it out of "
        "the dry run, or record a real run under the plan."
    ),
    "remat": (
        "what is dropped hangs on memory that is really held and on how long operators take, and here neither is. "
        "Leave it out of the dry run, and predict it on its recording with memprof predict."
    ),
}


def check_plan(plan: Plan | None) -> None:
    """Rejects a plan that a dry run would not apply as a real run does.

    Raises:
        CannotStartError: The plan contains such a policy; the message names it.
    """
    policies = plan.policies if plan is not None else ()
    for policy in policies:
        if policy.name in _LEFT_OUT:
            raise CannotStartError(f"a dry run cannot apply {policy.describe()}: {_LEFT_OUT[policy.name]}")
