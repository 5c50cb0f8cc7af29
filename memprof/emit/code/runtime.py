"""Policies without an equivalent in torch: the code calls memprof, which must be installed."""

from __future__ import annotations

from memprof.emit.code.pieces import Code
from memprof.policies.base import Policy
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import format_plan

_REASONS = {
    "compress": "torch packs no saved tensors in 8 bits",
    "loss": "torch cannot put a chunked cross-entropy in the place of the one your script calls",
    "optimizer": "torch's optimizers keep no state in 8 bits or in host memory",
    "remat": "torch drops and makes again no single saved tensors by a budget",
    "swap": "torch moves no parameters out between their uses",
}


def runtime_code(policies: tuple[Policy, ...], number: int, *, has_optimizer: bool = True) -> Code:
    """Returns code that applies policies through memprof.

    Args:
        policies: Consecutive policies of the plan.
        number: Index of this group in the plan, from 0.
        has_optimizer: Whether the applying function receives the optimizer.
    """
    name = f"_PLAN_{number}" if number else "_PLAN"
    text = format_plan(Plan(policies)).strip("\n").replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    optimizer = ", optimizer" if has_optimizer else ""
    return Code(
        imports=("import memprof",),
        helpers=(
            (
                "# What torch has no way of its own for, in the form of a plan that memprof applies.\n"
                f'{name} = """\n{text}\n"""'
            ),
        ),
        calls=(f"memprof.apply(memprof.parse_plan({name}), model{optimizer})",),
        needs_optimizer=any(needs_optimizer(each) for each in policies),
        notes=tuple(
            f"{each.describe()}: needs memprof where the job runs, as {_REASONS[each.name]}." for each in policies
        ),
    )


def needs_runtime(policy: Policy) -> bool:
    """Returns whether a policy has no equivalent in torch's API."""
    if policy.name == "swap":
        return getattr(policy, "what", "") == "parameters"
    if policy.name == "optimizer":
        return bool(getattr(policy, "state", ""))
    return policy.name in _REASONS


def needs_optimizer(policy: Policy) -> bool:
    """Returns whether a policy changes the optimizer."""
    if policy.name == "swap":
        return getattr(policy, "what", "") == "optimizer"
    return policy.name == "optimizer" or bool(getattr(policy, "is_pure", False))
