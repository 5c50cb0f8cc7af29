"""Records a job, searches for a plan, runs the job under it, and goes on until one was measured to fit."""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from memprof.analysis.suggest import Suggestion, describe_least
from memprof.errors import BadInputError, InconclusiveError
from memprof.launch.fit.attempt import Attempt, Measured, measure
from memprof.launch.fit.outputs import Outputs, discard
from memprof.launch.fit.shortlist import Shortlist
from memprof.launch.parent import Recorded, run_recorded
from memprof.launch.settings import Settings
from memprof.launch.target import Target
from memprof.launch.verdict import describe_status
from memprof.planners.space.explore import Wish
from memprof.policies.plan import Plan
from memprof.policies.plan_file import write_plan
from memprof.trace.store import Trace
from memprof.units import format_bytes

#: Signals by which somebody wants all of it to end; the others are the job's own business.
_ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})

#: Searches for plans: the recording, and what is asked for.
Search = Callable[[Trace, Wish], Suggestion]


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        target: The job.
        outputs: Where everything goes.
        wish: Makes what is asked of a search, of the peak that was recorded.
        skip: Steps to let pass in each run.
        steps: Steps to record in each run.
        stop: End each run after the recorded steps.
        verify: How many plans to verify, of which the fastest is kept.
        most_attempts: Most runs under a plan.
    """

    target: Target
    outputs: Outputs
    wish: Callable[[int], Wish]
    skip: int = 2
    steps: int = 3
    stop: bool = True
    verify: int = 1
    most_attempts: int = 8


@dataclass
class Fit:
    """What came of it.

    Attributes:
        request: What was asked for.
        budget_bytes: Most bytes that may be allocated at once; 0 where the job failed before that was known.
        recorded: What the job needs as it is, None where it failed.
        attempts: Its runs under plans, in order.
        best: The attempt whose plan was written, None where none was.
        returncode: Exit status of the job as it is, where it failed by itself; 0 otherwise.
        ended_by: Signal that ended all of it, 0 where none did.
        reason: Why no plan was written, "" where one was.
        least_bytes: Least peak that was measured, or predicted where nothing could be measured below it.
        warnings: What a reader must know to judge the figures.
    """

    request: Request
    budget_bytes: int = 0
    recorded: Measured | None = None
    attempts: list[Attempt] = field(default_factory=list)
    best: Attempt | None = None
    returncode: int = 0
    ended_by: int = 0
    reason: str = ""
    least_bytes: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def is_met(self) -> bool:
        """Whether the job fits as it is."""
        return self.recorded is not None and self.recorded.peak_bytes <= self.budget_bytes


def fit(request: Request, search: Search, say: Callable[[str], None]) -> Fit:
    """Finds a plan under which a job is measured to stay within a budget.

    The plan is written when a run under it has stayed within the budget, and not before. A run above the budget
    tightens the search by the error seen; a plan that cannot be applied to the job, or under which the job fails, is
    left out of it. An interruption (Ctrl-C) ends it with the best plan verified so far.

    Args:
        request: What is asked for.
        search: Searches for plans.
        say: Told in a sentence what is done next, and what came of it.

    Raises:
        BadInputError: The recording holds no operators.
        InconclusiveError: Nothing was recorded of the job, or no step of it to its end.
        MemprofError: The job cannot be started.
    """
    found = Fit(request)
    try:
        _fit(found, search, say)
    except KeyboardInterrupt:
        found.ended_by = signal.SIGINT
    except _EndedError as error:
        found.ended_by = error.number
    finally:
        discard(request.outputs.attempt)
        request.outputs.remove_if_empty()
    if found.ended_by and found.best is None:
        found.reason = "It was interrupted before any plan was verified, so none was written."
    return found


class _EndedError(Exception):
    """A signal reached this process while the job ran."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _fit(found: Fit, search: Search, say: Callable[[str], None]) -> None:
    request = found.request
    say(f"recording {request.target.name} as it is")
    done = _run(request, request.outputs.run, None)
    if done.returncode:
        found.returncode = done.returncode
        recording = f" {done.verdict.sentence}" if done.output.is_file() else ""
        found.reason = f"The job failed by itself, without any plan: {describe_status(done.returncode)}.{recording}"
        return
    if not done.output.is_file():
        raise InconclusiveError(f"{done.verdict.sentence} So there is nothing to plan from.")
    trace = Trace.open(done.output)
    found.recorded = measure(trace)
    trace = trace.rank_trace(found.recorded.rank)
    wish = request.wish(found.recorded.peak_bytes)
    found.budget_bytes = wish.budget_bytes
    found.least_bytes = found.recorded.peak_bytes
    if found.is_met:
        return
    first = _searched(search, trace, wish)
    # What other steps need beyond the one that plans are made from, they are taken to need under a plan as well.
    excess = max(0, found.recorded.peak_bytes - first.answer.recorded.peak_bytes)
    if excess:
        wish = dataclasses.replace(wish, budget_bytes=max(1, wish.budget_bytes - excess))
        first = _searched(search, trace, wish)
    found.warnings = first.warnings
    shortlist = Shortlist(wish)
    shortlist.add(first.answer)
    _try_plans(found, shortlist, first, lambda tighter: _searched(search, trace, tighter), say)
    if found.best is None:
        found.reason = _why_none(found, first)


def _searched(search: Search, trace: Trace, wish: Wish) -> Suggestion:
    """Searches; an interruption, which a search takes for its own end, ends all of it.

    Raises:
        KeyboardInterrupt: The search was interrupted.
    """
    suggestion = search(trace, wish)
    answer = suggestion.answer
    if answer.was_stopped and answer.took_s < wish.time_limit_s:
        raise KeyboardInterrupt
    return suggestion


def _try_plans(
    found: Fit,
    shortlist: Shortlist,
    first: Suggestion,
    search: Callable[[Wish], Suggestion],
    say: Callable[[str], None],
) -> None:
    request = found.request
    searched = {shortlist.wish}
    verified = 0
    while len(found.attempts) < request.most_attempts and verified < request.verify:
        one = shortlist.next()
        if one is None:
            # A plan that was verified is the answer; only without one is there more to look for.
            tighter = shortlist.tightened(searched) if not verified else None
            if tighter is None:
                return
            searched.add(tighter)
            shortlist.add(search(tighter).answer)
            continue
        plan = first.predicted(one)
        say(f"trying {plan.describe()}, predicted peak {format_bytes(one.peak_bytes)}")
        attempt = _attempt(found, plan)
        found.attempts.append(attempt)
        say(_describe(attempt))
        if attempt.measured is not None:
            found.least_bytes = min(found.least_bytes, attempt.measured.peak_bytes)
        if attempt.outcome == "fits":
            verified += 1
            shortlist.note_verified(one)
            _keep_if_best(found, attempt)
        elif attempt.measured is not None and attempt.outcome == "above":
            shortlist.note_above(one, attempt.measured.peak_bytes)
            _search_tighter(shortlist, searched, search)
        else:
            shortlist.note_refused(one)


def _search_tighter(shortlist: Shortlist, searched: set[Wish], search: Callable[[Wish], Suggestion]) -> None:
    tighter = shortlist.tightened(searched)
    if tighter is not None:
        searched.add(tighter)
        shortlist.add(search(tighter).answer)


def _attempt(found: Fit, plan: Plan) -> Attempt:
    """Runs the job under a plan."""
    request = found.request
    done = _run(request, request.outputs.attempt, plan)
    if done.refusal:
        return Attempt(plan, "refused", None, done.refusal)
    if done.missed:
        return Attempt(plan, "refused", None, " ".join(done.missed))
    if done.returncode or not done.output.is_file():
        return Attempt(plan, "failed", None, done.verdict.sentence if not done.returncode else _failure(done))
    try:
        measured = measure(Trace.open(done.output))
    except (BadInputError, InconclusiveError) as error:
        return Attempt(plan, "failed", None, str(error))
    return Attempt(plan, "fits" if measured.peak_bytes <= found.budget_bytes else "above", measured)


def _failure(done: Recorded) -> str:
    return f"the job failed under it, and does not without it: {describe_status(done.returncode)}."


def _run(request: Request, output: Path, plan: Plan | None) -> Recorded:
    """Runs the job, its output among the errors: what stands on stdout is the answer.

    Raises:
        _EndedError: A signal reached this process meanwhile that ends all of it.
    """
    settings = Settings(
        output=output,
        force=plan is not None,
        skip=request.skip,
        steps=request.steps,
        stop=request.stop,
        plan=plan,
    )
    done = run_recorded(request.target, settings, None if sys.stderr is None else sys.stderr.fileno())
    ending = sorted(done.signals & _ENDING)
    if ending:
        discard(done.output)  # a run that was cut short tells nothing of the job
        raise _EndedError(ending[0])
    return done


def _keep_if_best(found: Fit, attempt: Attempt) -> None:
    """Writes a plan that was verified, unless one that was is faster."""
    if found.best is not None and not _time_of(attempt) < _time_of(found.best):
        return
    outputs = found.request.outputs
    outputs.keep_attempt()
    write_plan(outputs.plan, attempt.plan)
    found.best = attempt


def _time_of(attempt: Attempt) -> float:
    time_us = math.nan if attempt.measured is None else attempt.measured.step_time_us
    return time_us if math.isfinite(time_us) else math.inf


def _describe(attempt: Attempt) -> str:
    if attempt.measured is None:
        return f"{attempt.outcome}: {attempt.reason}"
    measured = format_bytes(attempt.measured.peak_bytes)
    return f"measured peak {measured}: {'within' if attempt.outcome == 'fits' else 'above'} the budget"


def _why_none(found: Fit, first: Suggestion) -> str:
    if not found.attempts:
        return describe_least(first)
    budget = format_bytes(found.budget_bytes)
    measured = [(one.measured.peak_bytes, one.plan.describe()) for one in found.attempts if one.measured is not None]
    count = len(found.attempts)
    if not measured:
        tries = f"None of {count} plans tried" if count > 1 else "The plan tried"
        could = "could be applied" if count > 1 else "could not be applied"
        return (
            f"{tries} {could} to the job: {found.attempts[-1].reason} The least peak reached is that of the job as it "
            f"is, {format_bytes(found.least_bytes)}."
        )
    least, plan = min(measured)
    more = (
        " Allow more runs with --attempts."
        if len(found.attempts) == found.request.most_attempts
        else " Give at least that budget, or allow more policies."
    )
    return (
        f"No plan was verified within {budget}: of {count} tried, the least peak measured is {format_bytes(least)} "
        f"with {plan}.{more}"
    )
