"""Replaces a step with the measured step of a compiled run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from memprof.errors import PolicyError, UsageError
from memprof.policies.base import Policy
from memprof.policies.compile.policy import Compile
from memprof.policies.plan.plan_tables import plan_from_tables
from memprof.trace.step import Step
from memprof.trace.store import Trace


def transform(step: Step, policy: Compile) -> Step:
    """Returns the fullest step of the measured run.

    Nothing is modelled: what a compiler fuses, keeps and recomputes is not predictable from a recording, and the peak
    does not even fall in proportion to the budget. The measured run is one of the whole plan, so it already
    includes the earlier policies.

    Raises:
        PolicyError: There is no measured run, or it is one of another model.
    """
    if not policy.measured:
        patterns = ",".join(name or "." for name in policy.modules)
        budget = f"@{policy.activation_budget:g}" if policy.activation_budget < 1 else ""
        budget += f",fusion={policy.fusion_gb:g}" if policy.fusion_gb >= 0 else ""
        raise PolicyError(
            "what torch.compile keeps for backward cannot be predicted: use memprof suggest --compile, which "
            f"dry-runs the job compiled, or run `memprof record --compile '{patterns}{budget}' train.py` with the "
            "plan's other policies, and give its file to memprof suggest --compiled, or as `measured` in the plan."
        )
    if not Path(policy.measured).exists():
        raise PolicyError(f"the measured run {policy.measured} is not there; write the path of a recording.")
    measured = Trace.open(Path(policy.measured)).fullest_step()
    expected, found = (int(one.modules.parameter_bytes.sum()) for one in (step, measured))
    if expected != found:
        raise PolicyError(
            f"the measured run {policy.measured} is one of another model: its parameters have {found:,} bytes, these "
            f"{expected:,}."
        )
    return measured


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
