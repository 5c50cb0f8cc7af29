"""Records a job, searches for a plan, runs the job under it, and repeats until one is measured to fit."""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from memprof.analysis.allocator.uncertainty import room_of
from memprof.analysis.plans.host_budget import with_host
from memprof.analysis.plans.suggest import Suggestion
from memprof.errors import BadInputError, InconclusiveError
from memprof.launch.dry.dry_job import find_recorded_device
from memprof.launch.dry.dry_outcome import EndedError
from memprof.launch.dry.job_server import dry_run
from memprof.launch.fit.rehearsal import Rehearsal, compiled_plans, measured_plan
from memprof.launch.fit.request import Attempt, FitResult, Request, discard, measure
from memprof.launch.fit.sentences import (
    INTERRUPTED,
    announce,
    describe_attempt,
    describe_dry_baseline,
    describe_dry_fit,
    describe_dry_run,
    describe_failure_as_it_is,
    describe_failure_under_plan,
    why_none,
)
from memprof.launch.parent.recorded_job import Recorded, run_recorded
from memprof.launch.parent.relay import ENDING
from memprof.launch.parent.settings import Settings
from memprof.launch.parent.target import CannotStartError
from memprof.planners.search.plan_queue import PlanQueue
from memprof.planners.search.request import SearchRequest
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.plan.several_steps import NO_DRY_STEPS, DrySteps
from memprof.trace.store import Trace

#: Searches for plans, given the recording, the search request and steps from dry runs.
Search = Callable[[Trace, SearchRequest, DrySteps], Suggestion]


def fit(request: Request, search: Search, say: Callable[[str], None]) -> FitResult:
    """Finds a plan under which a job is measured to stay within a budget.

    The plan is written only after a run under it stayed within the budget. A run above the budget tightens the search
    by the observed error; a plan that cannot be applied to the job, or under which the job fails, is excluded. An
    interruption (Ctrl-C) ends the fit with the best plan verified so far.

    Raises:
        BadInputError: The recording contains no operators.
        InconclusiveError: Nothing was recorded of the job, or no complete step.
        MemprofError: The job cannot be started.
    """
    found = FitResult(request)
    try:
        _fit(found, search, say)
    except KeyboardInterrupt:
        found.ended_by = signal.SIGINT
    except EndedError as error:
        found.ended_by = error.number
    finally:
        discard(request.outputs.attempt)
        request.outputs.remove_if_empty()
    if found.ended_by and found.best is None:
        found.reason = INTERRUPTED
    return found


def _fit(found: FitResult, search: Search, say: Callable[[str], None]) -> None:
    request = found.request
    say(f"recording {request.target.name} without a plan")
    done = _run(request, request.outputs.run, None)
    if done.returncode and not _dry_run_instead(found, done, say):
        found.returncode = done.returncode
        found.reason = describe_failure_as_it_is(done)
        return
    if not done.output.is_file():
        raise InconclusiveError(f"{done.verdict.sentence} There is nothing to plan from.")
    trace = Trace.open(done.output)
    found.recorded = measure(trace)
    trace = trace.rank_trace(found.recorded.rank)
    search_request = request.search_request(found.recorded.peak_bytes, room_of(trace))
    search_request = with_host(search_request, trace, None, trace.manifest.machine.device_kind != "cpu")
    found.budget_bytes = search_request.budget_bytes
    found.least_bytes = found.recorded.peak_bytes
    if found.is_met:
        return
    reserved_bytes = found.dry_reserved_bytes if search_request.counts_reserved else 0
    if found.is_from_dry_run and max(found.recorded.peak_bytes, reserved_bytes) <= found.budget_bytes:
        found.returncode = done.returncode
        found.reason = describe_dry_fit(found)
        return
    first = _searched(search, trace, search_request)
    with Rehearsal(found, first.manifest, say, first.basis.peaks) as rehearsal:
        dry_steps = rehearsal.steps(first)
        if dry_steps:
            first = _searched(search, trace, search_request, dry_steps)
        found.warnings = (*found.warnings, *first.warnings)
        queue = PlanQueue(first.answer, lambda tighter: _searched(search, trace, tighter, dry_steps).answer)
        _try_plans(found, queue, first, rehearsal, say)
    if request.compiles:
        slowdown = first.answer.search_request.most_slowdown
        slowest_us = math.inf if slowdown is None else (1 + slowdown) * first.answer.recorded.step_time_us
        outputs = found.request.outputs
        for plan in compiled_plans(found):
            say(f"trying {plan.describe()} (its effect can only be measured)")
            attempt = _attempt(found, plan)
            measured = attempt.measured
            if measured is not None:
                head = Trace.open(outputs.attempt).rank_trace(measured.rank)
                attempt = dataclasses.replace(attempt, plan=measured_plan(plan, first, head, outputs.head))
                found.least_bytes = min(found.least_bytes, measured.peak_bytes)
            found.attempts.append(attempt)
            say(describe_attempt(attempt))
            if attempt.outcome == "fits" and not _time_of(attempt) > slowest_us:
                _keep_if_best(found, attempt)
    if found.best is None:
        found.reason = why_none(found, first)


def _dry_run_instead(found: FitResult, done: Recorded, say: Callable[[str], None]) -> bool:
    """Replaces the recording of a job that ran out of memory with its dry run; returns whether that succeeded."""
    request = found.request
    if request.dry_window is None or not done.verdict.post_mortem:
        return False
    say(describe_dry_baseline(done))
    try:
        device = find_recorded_device(Trace.open(done.output).manifest) if done.output.is_file() else ""
    except CannotStartError as error:
        say(str(error))
        return False
    outcome = dry_run(request.target, None, request.dry_window, device, request.outputs.attempt)
    if outcome.peak_bytes is None:
        say(f"it cannot be dry-run: {outcome.reason}")
        return False
    request.outputs.attempt.replace(request.outputs.run)
    found.is_from_dry_run = True
    found.dry_reserved_bytes = outcome.reserved_bytes
    return True


def _searched(
    search: Search, trace: Trace, search_request: SearchRequest, dry_steps: DrySteps = NO_DRY_STEPS
) -> Suggestion:
    """Runs a search; raises on an interruption, which a search by itself takes as the signal to stop early.

    Raises:
        KeyboardInterrupt: The search was interrupted.
    """
    suggestion = search(trace, search_request, dry_steps)
    if suggestion.answer.was_interrupted:
        raise KeyboardInterrupt
    return suggestion


def _try_plans(
    found: FitResult, queue: PlanQueue, first: Suggestion, rehearsal: Rehearsal, say: Callable[[str], None]
) -> None:
    request = found.request
    verified = 0
    # At most as many plans are skipped as may be run.
    while max(found.runs, len(found.attempts) - found.runs) < request.most_attempts and verified < request.verify:
        one = queue.next()
        if one is None:
            return
        plan = dataclasses.replace(first.predicted(one), budget_bytes=found.budget_bytes)
        say(announce(plan, one))
        checked = rehearsal.dry_run(plan).checked(plan, one, first.answer.search_request)
        if checked.fits is not None:
            say(describe_dry_run(checked))
        if checked.fits is False:
            dry = Attempt(
                plan, "passed over", None, dry_bytes=checked.dry_bytes, dry_reserved_bytes=checked.reserved_bytes
            )
            found.attempts.append(dry)
            queue.note_above(one, found.budget_bytes + checked.excess_bytes, is_reserved=checked.is_reserved)
            continue
        attempt = dataclasses.replace(_attempt(found, plan), dry_bytes=checked.dry_bytes)
        found.attempts.append(attempt)
        say(describe_attempt(attempt))
        if attempt.ran_out:
            queue.note_above(one, found.budget_bytes + 1)  # the excess is unknown
            continue
        if attempt.measured is None:
            queue.note_refused(one)
            continue
        found.least_bytes = min(found.least_bytes, attempt.measured.peak_bytes)
        if attempt.outcome == "fits":
            verified += 1
            queue.note_verified(one)
            _keep_if_best(found, attempt)
        else:
            queue.note_above(one, attempt.measured.peak_bytes)


def _attempt(found: FitResult, plan: Plan) -> Attempt:
    """Runs the job under a plan."""
    request = found.request
    done = _run(request, request.outputs.attempt, plan)
    if done.refusal:
        return Attempt(plan, "refused", None, done.refusal)
    if done.missed:
        return Attempt(plan, "refused", None, " ".join(done.missed))
    if done.returncode or not done.output.is_file():
        ran_out = bool(done.returncode and done.verdict.post_mortem)
        return Attempt(plan, "failed", None, describe_failure_under_plan(done), ran_out=ran_out)
    try:
        measured = measure(Trace.open(done.output))
    except (BadInputError, InconclusiveError) as error:
        return Attempt(plan, "failed", None, str(error))
    return Attempt(plan, "fits" if measured.peak_bytes <= found.budget_bytes else "above", measured)


def _run(request: Request, output: Path, plan: Plan | None) -> Recorded:
    """Runs the job with its stdout redirected to stderr: stdout is reserved for the result.

    Raises:
        EndedError: A signal that asks the whole command to end arrived during the run.
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
    ending = sorted(done.signals & ENDING)
    if ending:
        discard(done.output)  # an interrupted run is no measurement of the job
        raise EndedError(ending[0])
    return done


def _keep_if_best(found: FitResult, attempt: Attempt) -> None:
    """Writes a verified plan, unless an earlier verified one is faster."""
    if found.best is not None and not _time_of(attempt) < _time_of(found.best):
        return
    outputs = found.request.outputs
    outputs.keep_attempt()
    write_plan(outputs.plan, attempt.plan)
    found.best = attempt


def _time_of(attempt: Attempt) -> float:
    time_us = math.nan if attempt.measured is None else attempt.measured.step_time_us
    return time_us if math.isfinite(time_us) else math.inf
