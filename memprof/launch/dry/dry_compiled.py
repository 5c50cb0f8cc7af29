"""Dry-runs a job under torch.compile, with lower activation budgets until the peak is within a budget in bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from memprof.analysis.plans.compiled_steps import steps_of_compiled
from memprof.analysis.plans.suggest import Suggestion
from memprof.errors import BadInputError, InconclusiveError
from memprof.launch.dry.dry_job import DryOutcome
from memprof.policies.base import Policy
from memprof.policies.compile.policy import Compile
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.several_steps import DrySteps
from memprof.policies.precision.policy import Precision
from memprof.policies.swap.policy import Swap
from memprof.trace.files.spool import RAN_EAGERLY
from memprof.trace.step import Step
from memprof.trace.store import Trace

#: Policies that can be combined with the compiler, as can moving the optimizer's state; others change what it compiles.
_COMBINABLE = (Precision, ChunkedLoss, OptimizerPolicy)
#: The search for the largest share that fits ends at this accuracy.
_ACCURACY = 0.1


@dataclass(frozen=True)
class CompiledPlans:
    """The compiled plans that were dry-run.

    Attributes:
        steps: Their steps, by their policies.
        reason: Why there is none, a sentence; "" where there is one.
    """

    steps: DrySteps = field(default_factory=dict)
    reason: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The reason as a warning, if there is one."""
        return (f"no compiled plan was dry-run: {self.reason}",) if self.reason else ()


def compiled_plans(found: Suggestion, most: int, run: Callable[[Plan, Path], DryOutcome]) -> CompiledPlans:
    """Dry-runs the job with its whole model compiled, alone and combined with policies of the best plan.

    The compiler's budget is a share of what it would save by default, and the peak need not fall with it
    (https://github.com/pytorch/pytorch/issues/197838), so the peak of each share is that of its own dry run. The range
    between a share that fits and one that does not is halved.

    Args:
        found: The search result for the job as it is.
        most: Maximum number of dry runs for each set of other policies.
        run: Dry-runs the job under a plan, and writes the recording to a path.
    """
    steps: dict[tuple[Policy, ...], tuple[Step, ...]] = {}
    reason = ""
    budget_bytes = found.answer.search_request.budget_bytes
    for others in _combinable(found):
        shares = _shares()
        share = next(shares)
        for _ in range(most):
            policies = (*others, Compile(activation_budget=share))
            outcome, made = _dry_run(found, policies, run)
            if made is None:
                reason = reason or outcome.reason or "the dry run has no step on the recorded inputs."
                break
            steps[policies] = made
            fits = outcome.peak_bytes is not None and outcome.peak_bytes <= budget_bytes
            if fits and share == 1.0:
                return CompiledPlans(steps)
            try:
                share = shares.send(fits)
            except StopIteration:
                break
    return CompiledPlans(steps, "" if steps else reason)


def _combinable(found: Suggestion) -> Iterator[tuple[Policy, ...]]:
    """Yields the sets of other policies to compile with: none, and those of the best plan that can be combined."""
    yield ()
    best = found.answer.best or found.answer.least
    others = tuple(policy for policy in best.policies if _is_combinable(policy))
    if others:
        yield others


def _is_combinable(policy: Policy) -> bool:
    return isinstance(policy, _COMBINABLE) or (isinstance(policy, Swap) and policy.what == "optimizer")


def _shares() -> Generator[float, bool, None]:
    """Yields budgets as shares from 0 to 1, the largest first; the caller sends whether each fits."""
    if (yield 1.0):
        return
    above, below = 1.0, 0.0
    has_fit = False
    while above - below > _ACCURACY:
        share = round((above + below) / 2, 2)
        if (yield share):
            below, has_fit = share, True
        else:
            above = share
    if not has_fit:
        yield 0.0


def _dry_run(
    found: Suggestion, policies: tuple[Policy, ...], run: Callable[[Plan, Path], DryOutcome]
) -> tuple[DryOutcome, tuple[Step, ...] | None]:
    with tempfile.TemporaryDirectory(prefix="memprof-dry-") as folder:
        path = Path(folder, "dry.memprof")
        outcome = run(Plan(policies), path)
        if outcome.peak_bytes is None:
            return outcome, None
        try:
            trace = Trace.open(path, found.manifest.rank)
            eager = next((note for note in trace.manifest.notes if RAN_EAGERLY in note), "")
            if eager:
                return DryOutcome(None, eager), None
            return outcome, steps_of_compiled(found.basis, trace)
        except (BadInputError, InconclusiveError) as error:
            return DryOutcome(None, str(error)), None
