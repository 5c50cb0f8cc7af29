"""The job under torch.compile: what the compiler saves for backward can only be measured, so the job is run."""

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

#: Activation budgets of the compiler to try in turn, as fractions of what it would save for backward, until one fits.
_BUDGETS = (1.0, 0.5, 0.2)


def compiled_plans(found: FitResult) -> Iterator[Plan]:
    """Yields the plans to run with the whole model compiled, stopping once one fits.

    Precision and chunked loss of the best plan so far are kept: they are independent of the compiler.

    Args:
        found: The result of the runs so far; read again for each plan.
    """
    others: tuple[Policy, ...] = ()
    if found.best is not None:
        others = tuple(policy for policy in found.best.plan.policies if isinstance(policy, Precision | ChunkedLoss))
    for budget in _BUDGETS:
        yield Plan((*others, Compile(activation_budget=budget)), budget_bytes=found.budget_bytes)
        if is_settled(found.attempts[-1]):
            return


def measured_plan(plan: Plan, first: Suggestion, head: Trace, path: Path) -> Plan:
    """Returns a compiled plan with the measurement as its prediction.

    Args:
        plan: The plan.
        first: The search on the unmodified job.
        head: The run under the plan.
        path: Where that run's recording will be kept.
    """
    policies = tuple(
        replace(policy, measured=str(path)) if isinstance(policy, Compile) else policy for policy in plan.policies
    )
    prediction = Prediction.measured(first.basis.step, head.fullest_step(), trace=first.trace)
    return Plan(policies, prediction, plan.budget_bytes)


def is_settled(attempt: Attempt) -> bool:
    """Returns whether a smaller compiler budget is pointless: the plan fits, or the job cannot be compiled."""
    return attempt.outcome != "above"
