"""The parent of a recorded job: starts it, monitors it from outside, and packs the recording."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from memprof.errors import InconclusiveError, MemprofError
from memprof.launch.consent import note_recording
from memprof.launch.outcome.output import upload
from memprof.launch.outcome.plan_marks import REFUSED_STATUS
from memprof.launch.outcome.verdict import Verdict
from memprof.launch.parent.recorded_job import Recorded, run_recorded
from memprof.launch.parent.relay import ENDING
from memprof.launch.parent.settings import Settings
from memprof.launch.parent.target import Target
from memprof.trace.secrets import mask_words

if TYPE_CHECKING:
    from memprof.analysis.plans.another_plan import PlannedJob


def record_job(target: Target, settings: Settings) -> int:
    """Runs a job under the recorder, packs the recording and prints the verdict.

    Returns:
        The job's own exit status, negative for the signal that killed it. If that is 0: 3 if nothing was recorded, or
        the budget verdict's if the job should fail over its budget.

    Raises:
        CannotStartError: The recording cannot be written, or no process can be started.
        NotExecutableError: The target cannot be run.
        NotFoundError: The target does not exist.
    """
    done = run_recorded(target, settings)
    if done.refusal:
        # Printed even with --quiet: the job has not trained.
        _say(f"memprof: {done.refusal}")
        if not settings.quiet and settings.plan is not None:
            _say_refused(target, settings, done)
        return REFUSED_STATUS  # torchrun returns its own status for a rank that ends with this one
    if settings.plan is None and done.output.is_file():
        note_recording(done.output, done.own_files)
    verdict = _with_plan_and_budget(target, settings, done)
    address = _deliver(done.output, settings) if settings.address and done.output.is_file() else ""
    # Printed even with --quiet where nothing was recorded: it is why the status is not the job's.
    is_unexplained = verdict.is_empty and not done.returncode
    if not settings.quiet or is_unexplained:
        _say(str(verdict).replace(str(done.output), address) if address else str(verdict))
    if done.warning and not settings.quiet:
        _say(f"memprof: {done.warning}")
    for sentence in done.missed:
        _say(f"memprof: {sentence}")
    if is_unexplained:
        return InconclusiveError.exit_code
    if done.returncode or not settings.fail_over_budget:
        return done.returncode
    status = InconclusiveError.exit_code if verdict.budget is None else verdict.budget.exit_code
    if status and settings.quiet:
        # Printed in any case: it is why a successful job fails.
        _say(f"memprof: {verdict.budget_sentence or verdict.sentence}")
    return status


def _with_plan_and_budget(target: Target, settings: Settings, done: Recorded) -> Verdict:
    """Returns the verdict with the results for the job's plan and budget, if printed or decisive for the status."""
    verdict, budget_bytes = done.verdict, settings.budget_bytes
    if (settings.plan is None and budget_bytes is None) or (settings.quiet and not settings.fail_over_budget):
        return verdict
    from memprof.launch.outcome.plan_verdict import (  # imports the trace readers
        Ended,
        add_budget,
        add_plan,
    )

    recording = done.output if done.output.is_file() else None
    job = _planned_job(target, settings)
    is_ended = bool(done.signals) or -done.returncode in ENDING
    ended = Ended(
        has_failed=bool(done.returncode) and not is_ended,
        ran_out=bool(verdict.post_mortem) or done.returncode == -signal.SIGKILL,
        was_killed=done.was_killed,
        fault=done.fault,
    )
    verdict = add_plan(verdict, job, ended, recording)
    return add_budget(verdict, job, budget_bytes, recording, _words_of(target))


def _say_refused(target: Target, settings: Settings, done: Recorded) -> None:
    from memprof.launch.outcome.plan_verdict import describe_refused

    job = _planned_job(target, settings)
    if job is not None and (verdict := describe_refused(job, done.fault)) is not None:
        _say(str(verdict))


def _planned_job(target: Target, settings: Settings) -> PlannedJob | None:
    from memprof.analysis.plans.another_plan import PlannedJob

    if settings.plan is None:
        return None
    plan = replace(settings.plan, budget_bytes=settings.budget_bytes)
    return PlannedJob(plan, settings.plan_path, _words_of(target))


def _words_of(target: Target) -> str:
    from memprof.analysis.plans.predict import words_of

    return words_of(mask_words(target.arguments))


def leave_like(returncode: int) -> NoReturn:
    """Ends this process as the job ended, even by a signal, so that a shell sees the same status.

    Args:
        returncode: The job's exit status, negative for a signal.
    """
    if returncode >= 0 and not sys.flags.inspect:
        sys.exit(returncode)
    sys.stdout.flush()
    sys.stderr.flush()
    if returncode >= 0:
        os._exit(returncode)  # PYTHONINSPECT is meant for the job; sys.exit would start a session here, too
    import resource  # Windows, where recordings are only read, lacks it

    # The job has dumped its core; one of memprof's would overwrite it.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if -returncode != signal.SIGKILL:
        signal.signal(-returncode, signal.SIG_DFL)
    os.kill(os.getpid(), -returncode)
    # Reached only if the signal is blocked. The shell's number for it is the closest substitute.
    os._exit(128 - returncode)


def _deliver(output: Path, settings: Settings) -> str:
    """Uploads the recording to its address and returns that; "" if it stays local, which is always reported."""
    address = f"{settings.address.rpartition('/')[0]}/{output.name}"
    try:
        upload(output, address)
    except MemprofError as error:
        _say(f"memprof: {str(error).rstrip('.')}; the recording stays in {output}.")
        return ""
    return address


def _say(text: str) -> None:
    # If stderr is closed, the job's exit status matters more than the message.
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
