"""Says which plans a dry run can apply: those that do not need the data they keep, move or shorten."""

from __future__ import annotations

from memprof.launch.target import CannotStartError
from memprof.policies.base import Policy
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan import Plan

#: Policies that choose what is computed and kept. The others look into tensors' memory, and leave alone what has none.
_APPLIED = ("precision", "accumulate", "checkpoint", "optimizer", "allocator")


def check_plan(plan: Plan | None) -> None:
    """Refuses a plan that a dry run would not apply as a real run does.

    Raises:
        CannotStartError: It holds such a policy, which the sentence names.
    """
    left = [policy.describe() for policy in plan.policies if not _is_applied(policy)] if plan is not None else []
    if left:
        raise CannotStartError(
            f"a dry run cannot apply {', '.join(left)}: its tensors hold no data to move or shorten. Leave it out, and "
            "predict it on the dry run's recording with memprof predict."
        )


def _is_applied(policy: Policy) -> bool:
    if isinstance(policy, OptimizerPolicy) and policy.state:
        return False
    return policy.name in _APPLIED
