"""The plan that makes a recorded training fit a budget, and the arguments of a trainer that do."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memprof.analysis.plans.basis import Basis, basis_of, link_of
from memprof.analysis.plans.suggest import Suggestion, describe_least, suggest
from memprof.errors import UsageError
from memprof.integrations.asked import Asked
from memprof.launch.fit.attempt import measure
from memprof.machines.budget import parse_budget
from memprof.planners.search.explore import SearchRequest
from memprof.planners.search.tried import Candidate
from memprof.planners.search.workbench import Workbench, rank
from memprof.policies.base import Policy
from memprof.policies.plan.plan_file import write_plan
from memprof.trace.store import Trace
from memprof.units import format_bytes


@dataclass(frozen=True)
class Choice:
    """Arguments of a trainer, and the policies that do the same.

    Attributes:
        arguments: By name, as the trainer takes them.
        policies: What they amount to.
    """

    arguments: dict[str, Any]
    policies: tuple[Policy, ...]

    def spelled(self) -> str:
        """Writes the arguments as a call has them."""
        return ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())


@dataclass(frozen=True, eq=False)
class FittingPlan:
    """What was found for a budget.

    Attributes:
        recorded_bytes: Peak of the training as it is, in any recorded step.
        budget_bytes: Most bytes that may be allocated at once.
        suggestion: The search's answer; None where the training fits as it is.
        plan_path: File that the best plan was written to; None where there is none.
        basis: The steps that plans were replayed on.
    """

    recorded_bytes: int
    budget_bytes: int
    suggestion: Suggestion | None
    plan_path: Path | None
    basis: Basis = field(repr=False)

    @property
    def best(self) -> Candidate | None:
        """The fastest plan that fits."""
        return None if self.suggestion is None else self.suggestion.answer.best

    def sentences(self) -> list[str]:
        """Says what was found."""
        peak, budget = format_bytes(self.recorded_bytes), format_bytes(self.budget_bytes)
        if self.suggestion is None:
            return [f"the training fits as it is: its peak of {peak} is within {budget}."]
        best = self.best
        if best is None:
            return [describe_least(self.suggestion)]
        change = best.step_time_us / self.suggestion.answer.recorded.step_time_us - 1
        sentence = (
            f"fits {budget} with {best.plan.describe()}: predicted peak {format_bytes(best.peak_bytes)}, was {peak}; "
            f"step time {100 * change:+.0f} %. The plan is in {self.plan_path}."
        )
        return [sentence]

    def emitted_by(self, target: str) -> list[str]:
        """Says how to have the plan written as code, where there is one.

        Args:
            target: What stands behind ``memprof emit --to``.
        """
        return [] if self.plan_path is None else [f"the plan as code: memprof emit {self.plan_path} --to {target}"]

    def fastest(self, choices: Iterable[Choice], time_limit_s: float = 15.0) -> tuple[Choice, Candidate] | None:
        """Returns the fastest of a trainer's arguments that fit, and what they lead to.

        Args:
            choices: What to choose from.
            time_limit_s: When the search ends with the best so far.
        """
        bench = Workbench(self.basis.step, deadline=time.monotonic() + time_limit_s, others=self.basis.others)
        tried = [(choice, bench.try_plan(*choice.policies)) for choice in choices]
        fitting = [(choice, one) for choice, one in tried if one is not None and bench.needed(one) <= self.budget_bytes]
        return min(fitting, key=lambda pair: rank(pair[1]), default=None)


def describe_choice(found: tuple[Choice, Candidate] | None, fit: FittingPlan, name: str, what: str) -> str:
    """Says which arguments of a trainer make the training fit.

    Args:
        found: The arguments, and what they lead to; None where none fit.
        fit: What was found for the budget.
        name: What the arguments are called.
        what: What was tried.
    """
    if found is None:
        return f"no {name} alone make it fit; tried were {what}."
    choice, one = found
    recorded_us = one.step_time_us if fit.suggestion is None else fit.suggestion.answer.recorded.step_time_us
    return (
        f"{name} that make it fit: {choice.spelled()} (predicted peak {format_bytes(one.peak_bytes)}, step time "
        f"{100 * (one.step_time_us / recorded_us - 1):+.0f} %)."
    )


def find_fit(trace: Trace, asked: Asked) -> FittingPlan:
    """Searches for the fastest plan under which a recorded training fits, and writes it beside the recording.

    Args:
        trace: The recording.
        asked: The budget, and which policies may be used.

    Raises:
        InconclusiveError: No step was recorded to its end.
        UsageError: The budget makes no sense, or there is a plan already that may not be replaced.
        KeyboardInterrupt: Ctrl-C was pressed meanwhile, which is meant for the training.
    """
    basis = basis_of(trace)
    peak = measure(trace).peak_bytes
    budget = parse_budget(asked.budget, peak)
    if peak <= budget:
        return FittingPlan(peak, budget, None, None, basis)
    if asked.plan_path.exists() and not asked.force:
        raise UsageError(
            f"{asked.plan_path} exists already, and no plan is searched for. Replace it with force=True, or record "
            "into another folder."
        )
    search_request = SearchRequest(
        budget_bytes=max(1, budget),
        allow=asked.allow,
        forbid=asked.forbid,
        time_limit_s=asked.time_limit_s,
        link_bytes_per_us=link_of(trace),
    )
    found = suggest(trace, basis, search_request)
    if found.answer.was_interrupted:
        raise KeyboardInterrupt  # a search takes it for its own end; here it is meant for the training
    best = found.answer.best
    if best is None:
        return FittingPlan(peak, budget, found, None, basis)
    write_plan(asked.plan_path, found.predicted(best))
    return FittingPlan(peak, budget, found, asked.plan_path, basis)
