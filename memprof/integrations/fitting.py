"""The options of a recording inside another library's loop, and the plan that makes it fit a budget."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memprof.analysis.plans.basis import Basis, basis_of, link_of
from memprof.analysis.plans.suggest import Suggestion, describe_least, suggest
from memprof.errors import UsageError
from memprof.launch.fit.request import measure
from memprof.machines.budget import parse_budget
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.request import SearchRequest
from memprof.planners.search.workbench import Workbench, rank
from memprof.policies.base import Policy
from memprof.policies.plan.plan_file import write_plan
from memprof.trace.store import Trace
from memprof.units import format_bytes

#: A placeholder peak to validate a budget with before anything is recorded, so that errors surface at once.
_SOME_PEAK_BYTES = 1 << 40


@dataclass(frozen=True)
class Choice:
    """Arguments of a trainer, and the equivalent policies.

    Attributes:
        arguments: Values by name, as the trainer accepts them.
        policies: The equivalent policies.
    """

    arguments: dict[str, Any]
    policies: tuple[Policy, ...]

    def spelled(self) -> str:
        """Formats the arguments as in a call."""
        return ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())


@dataclass(frozen=True, eq=False)
class FittingPlan:
    """The search result for a budget.

    Attributes:
        recorded_bytes: Peak of the unmodified training over all recorded steps.
        budget_bytes: Maximum live bytes.
        suggestion: The search result; None if the training already fits.
        plan_path: File with the best plan; None if there is none.
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
        """Returns the result in sentences."""
        peak, budget = format_bytes(self.recorded_bytes), format_bytes(self.budget_bytes)
        if self.suggestion is None:
            return [f"the training already fits: its peak of {peak} is within {budget}."]
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
        """Returns the hint to export the plan as code, if there is a plan.

        Args:
            target: Value for ``memprof emit --to``.
        """
        return [] if self.plan_path is None else [f"the plan as code: memprof emit {self.plan_path} --to {target}"]

    def fastest(self, choices: Iterable[Choice], time_limit_s: float = 15.0) -> tuple[Choice, Candidate] | None:
        """Returns the fastest of a trainer's arguments that fit, and the predicted result.

        Args:
            choices: The candidates.
            time_limit_s: Time limit of the search in seconds; it then returns the best so far.
        """
        bench = Workbench(self.basis.step, deadline=time.monotonic() + time_limit_s, others=self.basis.others)
        tried = [(choice, bench.try_plan(*choice.policies)) for choice in choices]
        fitting = [(choice, one) for choice, one in tried if one is not None and bench.needed(one) <= self.budget_bytes]
        return min(fitting, key=lambda pair: rank(pair[1]), default=None)


def describe_choice(found: tuple[Choice, Candidate] | None, fit: FittingPlan, name: str, what: str) -> str:
    """Returns which arguments of a trainer make the training fit.

    Args:
        found: The arguments and their predicted result; None if none fit.
        fit: The search result for the budget.
        name: What the library calls the arguments.
        what: What was tried.
    """
    if found is None:
        return f"{name} alone cannot make it fit (tried: {what})."
    choice, one = found
    recorded_us = one.step_time_us if fit.suggestion is None else fit.suggestion.answer.recorded.step_time_us
    return (
        f"{name} that make it fit: {choice.spelled()} (predicted peak {format_bytes(one.peak_bytes)}, step time "
        f"{100 * (one.step_time_us / recorded_us - 1):+.0f} %)."
    )


def find_fit(trace: Trace, request: CallbackRequest) -> FittingPlan:
    """Searches for the fastest plan under which a recorded training fits, and writes it next to the recording.

    Raises:
        InconclusiveError: The recording contains no complete step.
        UsageError: The budget is invalid, or a plan exists that may not be overwritten.
        KeyboardInterrupt: Ctrl-C was pressed during the search; it is meant for the training.
    """
    basis = basis_of(trace)
    peak = measure(trace).peak_bytes
    budget = parse_budget(request.budget, peak)
    if peak <= budget:
        return FittingPlan(peak, budget, None, None, basis)
    if request.plan_path.exists() and not request.force:
        raise UsageError(
            f"{request.plan_path} exists already, so no plan is searched for. Replace it with force=True, or record "
            "into another folder."
        )
    search_request = SearchRequest(
        budget_bytes=max(1, budget),
        allow=request.allow,
        forbid=request.forbid,
        time_limit_s=request.time_limit_s,
        link_bytes_per_us=link_of(trace),
    )
    found = suggest(trace, basis, search_request)
    if found.answer.was_interrupted:
        raise KeyboardInterrupt  # the search treats Ctrl-C as its own end; here it is meant for the training
    best = found.answer.best
    if best is None:
        return FittingPlan(peak, budget, found, None, basis)
    write_plan(request.plan_path, found.predicted(best))
    return FittingPlan(peak, budget, found, request.plan_path, basis)


@dataclass(frozen=True)
class CallbackRequest:
    """What to record, and which budget to plan for.

    Attributes:
        path: File to write.
        steps: Steps to record.
        skip: Steps to skip first.
        force: Overwrite the file, and the plan next to it, if they exist.
        budget: Maximum live bytes; "" to search for no plan.
        allow: Names of the allowed policies; none for the default ones.
        forbid: Names of the forbidden policies.
        time_limit_s: Time limit of a search, in seconds.
    """

    path: Path
    steps: int = 3
    skip: int = 2
    force: bool = False
    budget: str = ""
    allow: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    time_limit_s: float = 30.0

    @property
    def plan_path(self) -> Path:
        """Path of the plan, next to the recording."""
        return self.path.with_name("plan.toml")


def make_request(
    path: str | os.PathLike[str],
    *,
    steps: int,
    skip: int,
    force: bool,
    budget: str | int | None,
    allow: tuple[str, ...] | list[str],
    forbid: tuple[str, ...] | list[str],
    time_limit: float,
) -> CallbackRequest:
    """Validates the options before training starts.

    Raises:
        UsageError: An option is invalid.
        PolicyError: Unknown policy.
    """
    if steps < 1 or skip < 0:
        raise UsageError(f"invalid window: skip={skip}, steps={steps}; skip must be >= 0 and steps >= 1.")
    if not time_limit > 0:
        raise UsageError(f"invalid time_limit {time_limit}: must be more than 0 seconds.")
    text = "" if budget is None else str(budget)
    if text:
        parse_budget(text, _SOME_PEAK_BYTES)
    elif allow or forbid:
        raise UsageError("allow and forbid choose policies of a plan: add budget='8GiB'.")
    if allow or forbid:
        from memprof.planners.search.workbench import allowed_names

        allowed_names(tuple(allow), tuple(forbid), ())
    return CallbackRequest(Path(path), steps, skip, force, text, tuple(allow), tuple(forbid), time_limit)
