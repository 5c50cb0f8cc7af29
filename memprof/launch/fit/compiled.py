"""The job under torch's compiler: what that keeps is known only when it has run, so it is run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from memprof.analysis.plans.suggest import Suggestion
from memprof.launch.fit.attempt import Attempt
from memprof.launch.fit.request import FitResult
from memprof.policies.base import Policy
from memprof.policies.compile.policy import Compile
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.prediction import Prediction
from memprof.policies.precision.policy import Precision
from memprof.trace.store import Trace

#: Shares of what the compiler would keep for backward that are tried, one after the other, until one fits.
_BUDGETS = (1.0, 0.5, 0.2)


def compiled_plans(found: FitResult) -> Iterator[Plan]:
    """Yields the plans to run with the whole model compiled, each while those before did not fit.

    Precision and chunked loss of the best plan so far are kept: the compiler has no say in them.

    Args:
        found: What came of the runs so far; it is looked at again for each plan.
    """
    others: tuple[Policy, ...] = ()
    if found.best is not None:
        others = tuple(policy for policy in found.best.plan.policies if isinstance(policy, Precision | ChunkedLoss))
    for budget in _BUDGETS:
        yield Plan((*others, Compile(activation_budget=budget)), budget_bytes=found.budget_bytes)
        if is_settled(found.attempts[-1]):
            return


def measured_plan(plan: Plan, first: Suggestion, head: Trace, path: Path) -> Plan:
    """Returns a plan that compiles with what was measured as its prediction.

    Args:
        plan: The plan.
        first: The search that began with the job as it is.
        head: The run under the plan.
        path: Where that run will be kept.
    """
    policies = tuple(
        replace(policy, measured=str(path)) if isinstance(policy, Compile) else policy for policy in plan.policies
    )
    prediction = Prediction.measured(first.basis.step, head.fullest_step(), trace=first.trace)
    return Plan(policies, prediction, plan.budget_bytes)


def is_settled(attempt: Attempt) -> bool:
    """Tells whether a smaller budget for the compiler would bring nothing: it fits, or the job cannot be compiled."""
    return attempt.outcome != "above"
