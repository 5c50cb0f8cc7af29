"""Plans that compile, predicted from measured runs: search candidates like any other."""

from __future__ import annotations

from dataclasses import replace

from memprof.errors import UsageError
from memprof.policies.base import Policy
from memprof.policies.compile.policy import Compile
from memprof.policies.plan.plan_tables import plan_from_tables
from memprof.trace.store import Trace


def policies_of_compiled(trace: Trace) -> tuple[Policy, ...]:
    """Returns the policies that a compiled run was recorded under, predicted by that run itself.

    Raises:
        UsageError: The run was not recorded under a plan that compiles.
        PolicyError: The plan in the recording makes no sense.
    """
    plan = plan_from_tables(trace.manifest.plan or {})
    if not any(isinstance(policy, Compile) for policy in plan.policies):
        raise UsageError(
            f"{trace.path} is not a recording of a compiled run; make one: memprof record --compile . train.py"
        )
    return tuple(
        replace(policy, measured=str(trace.path)) if isinstance(policy, Compile) else policy for policy in plan.policies
    )


def measured_policies(path: str) -> tuple[Policy, ...] | None:
    """Returns the policies that a run was recorded under, in their order; None where the recording names no plan."""
    tables = Trace.open(path).manifest.plan
    return None if tables is None else plan_from_tables(tables).policies
