"""Policies without an equivalent in torch: the code calls memprof, which must be installed."""

from __future__ import annotations

from memprof.emit.code.pieces import Code
from memprof.policies.base import Policy
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import format_plan


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
            (f'# The part of the plan without an equivalent in torch; memprof applies it.\n{name} = """\n{text}\n"""'),
        ),
        calls=(f"memprof.apply(memprof.parse_plan({name}), model{optimizer})",),
        needs_optimizer=any(each.needs_optimizer for each in policies),
        notes=tuple(
            f"{each.describe()}: needs memprof where the job runs, as {each.why_not_torch}." for each in policies
        ),
    )
