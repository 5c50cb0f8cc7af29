"""The parent of a recorded job: starts it, monitors it from outside, and packs the recording."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from memprof.errors import BadInputError, InconclusiveError, MemprofError, OutputError
from memprof.launch.consent import note_recording
from memprof.launch.outcome.memory_end import KillerWatch, describe_unrecorded
from memprof.launch.outcome.output import add_speed, claim_output, spool_of, write_exit, write_launch
from memprof.launch.outcome.plan_marks import REFUSED_STATUS, read_applied, read_fault, read_idle, read_refusal
from memprof.launch.outcome.upload import upload
from memprof.launch.outcome.verdict import Verdict, describe_missed, describe_nothing, describe_recording
from memprof.launch.own_files import read_own_files
from memprof.launch.parent.job_process import run_job
from memprof.launch.parent.relay import RELAYED
from memprof.launch.parent.settings import Settings
from memprof.launch.parent.target import Target
from memprof.launch.torch_versions import describe_newer
from memprof.trace.secrets.masking import mask_words

if TYPE_CHECKING:
    from memprof.analysis.plans.another_plan import PlannedJob


#: Signals that ask the whole command to end; other signals concern only the job.
ENDING = frozenset(number for number in RELAYED if not number.name.startswith("SIGUSR"))


@dataclass(frozen=True)
class Recorded:
    """The result of a job that ran under the recorder.

    Attributes:
        output: Path of the recording; missing if nothing was recorded.
        returncode: The job's own exit status, negative for the signal that killed it.
        verdict: What was recorded, or why nothing was.
        refusal: Why the job ended itself because its plan does not fit, "" if it did not.
        missed: Policies of its plan that were applied to no model, or had no effect.
        fault: Name of the policy that raised the error which ended it, "" if unknown.
        own_files: Digests of the job's own files by their paths; None if they changed while it ran.
        was_killed: Whether the kernel killed it for lack of memory.
        signals: Signals that reached memprof while the job ran, or the recording was packed.
        warning: The job's torch is newer than any that was tried, "" if it is not.
    """

    output: Path
    returncode: int
    verdict: Verdict
    refusal: str = ""
    missed: tuple[str, ...] = ()
    fault: str = ""
    own_files: dict[str, str] | None = None
    was_killed: bool = False
    signals: frozenset[int] = frozenset()
    warning: str = ""


def record_job(target: Target, settings: Settings) -> int:
    """Runs a job under the recorder, packs the recording and prints the verdict.

    Args:
        target: What to run.
        settings: How to record it.

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


def run_recorded(
    target: Target,
    settings: Settings,
    stdout: int | None = None,
    stderr: int | None = None,
    within: tuple[str, ...] = (),
) -> Recorded:
    """Runs a job under the recorder and packs the recording, without printing anything.

    Args:
        target: What to run.
        settings: How to record it.
        stdout: File descriptor for the job's output; None for this process's own.
        stderr: The same for its errors.
        within: Command prefix: the program and its arguments that exec the job's command line.

    Raises:
        CannotStartError: The recording cannot be written, or no process can be started.
        NotExecutableError: The target cannot be run.
        NotFoundError: The target does not exist.
    """
    begun = begin_recording(target, settings)
    try:
        returncode, signals = run_job(target, settings, begun.spool, stdout, stderr, within)
    except MemprofError:
        begun.abandon()
        raise
    return finish_recording(begun, returncode, signals)


@dataclass(frozen=True)
class Begun:
    """A recording whose job is about to start.

    Attributes:
        target: What to run.
        settings: How to record it.
        output: Path of the recording.
        spool: Its spool folder.
        killer: Detects that the kernel kills the job for lack of memory.
        started: Unix time in seconds.
    """

    target: Target
    settings: Settings
    output: Path
    spool: Path
    killer: KillerWatch
    started: float

    def abandon(self) -> None:
        """Removes the spool folder of a job that never started."""
        shutil.rmtree(self.spool, ignore_errors=True)


def begin_recording(target: Target, settings: Settings) -> Begun:
    """Claims the output of a recording and describes the job there.

    Args:
        target: What will be run.
        settings: How to record it.

    Raises:
        CannotStartError: The recording cannot be written.
    """
    output = claim_output(target, settings)
    spool = spool_of(output)
    write_launch(spool, target, settings)
    return Begun(target, settings, output, spool, KillerWatch.begin(), time.time())


def finish_recording(begun: Begun, returncode: int, signals: frozenset[int] = frozenset()) -> Recorded:
    """Packs the recording of a job that has ended.

    Args:
        begun: The recording.
        returncode: The job's exit status, negative for the signal that killed it.
        signals: Signals that reached memprof while it ran.
    """
    target, settings, output, spool, killer = (begun.target, begun.settings, begun.output, begun.spool, begun.killer)
    warning = describe_newer(spool)
    refusal = read_refusal(spool) if settings.plan is not None or settings.dry_run else ""
    fault = read_fault(spool) if settings.plan is not None else ""
    if refusal:
        verdict = _discard(spool, output, target, returncode)
        return Recorded(output, returncode, verdict, refusal=refusal, fault=fault, signals=signals)
    missed = (
        []
        if settings.plan is None
        else [*describe_missed(settings.plan, read_applied(spool)), *(f"{each}." for each in read_idle(spool))]
    )
    killed = killer.describe(spool, returncode)
    ends = tuple(sentence for sentence in (*describe_unrecorded(spool), killed) if sentence)
    own_files = read_own_files(spool, begun.started)
    verdict = _pack(spool, output, target, returncode)
    verdict = replace(verdict, post_mortem=(*ends, *verdict.post_mortem))
    if verdict.is_interrupted:
        signals |= {signal.SIGINT}
    return Recorded(
        output,
        returncode,
        verdict,
        missed=tuple(missed),
        fault=fault,
        own_files=own_files,
        was_killed=bool(killed),
        signals=signals,
        warning=warning,
    )


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


def _pack(spool: Path, output: Path, target: Target, returncode: int) -> Verdict:
    try:
        if not any(spool.glob("process-*/")):
            return _discard(spool, output, target, returncode)
        write_exit(spool, returncode)
        # Imported only now: the parent stays small while the job may need the memory.
        from memprof.launch.parent.speed import machine_speed
        from memprof.trace.files.pack import pack_spool

        add_speed(spool, machine_speed())
        return describe_recording(pack_spool(spool, output), target.name)
    except BadInputError:
        return _discard(spool, output, target, returncode)
    except MemprofError as error:
        return Verdict(str(error), is_empty=not isinstance(error.__cause__, OutputError))
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the job's exit status must survive memprof's bugs
        fault = f"{type(error).__name__}: {error}".rstrip(": ")
        is_interrupted = isinstance(error, KeyboardInterrupt)
        if not spool.exists():
            sentence = f"{output} was written, but could not be summarized ({fault})."
            return Verdict(sentence, f"memprof report {output}", is_interrupted=is_interrupted)
        sentence = f"the recording could not be packed ({fault}). "
        if is_interrupted:
            return Verdict(f"{sentence}It stays in {spool}.", f"memprof report {spool}", is_interrupted=True)
        return _kept(spool, output, target, returncode, sentence)


def _kept(spool: Path, output: Path, target: Target, returncode: int, sentence: str) -> Verdict:
    """Returns the verdict on a spool that could not be packed: it is called safe only if it can be read."""
    from memprof.trace.files.spool_folder import SpoolFolder

    try:
        has_recording = any(SpoolFolder.open(spool, None).ranks())
    except Exception as error:  # noqa: BLE001 - as above
        return Verdict(f"{sentence}Nor can it be read ({error}); its raw rows stay in {spool}.", is_empty=True)
    if not has_recording:
        return _discard(spool, output, target, returncode)
    return Verdict(f"{sentence}It is safe in {spool}.", f"memprof report {spool}")


def _deliver(output: Path, settings: Settings) -> str:
    """Uploads the recording to its address and returns that; "" if it stays local, which is always reported."""
    address = f"{settings.address.rpartition('/')[0]}/{output.name}"
    try:
        upload(output, address)
    except MemprofError as error:
        _say(f"memprof: {str(error).rstrip('.')}; the recording stays in {output}.")
        return ""
    return address


def _discard(spool: Path, output: Path, target: Target, returncode: int) -> Verdict:
    verdict = describe_nothing(spool, target.name, returncode)
    # With -f an older file may exist. If kept, it would be mistaken for this run's.
    output.unlink(missing_ok=True)
    shutil.rmtree(spool, ignore_errors=True)
    return verdict


def _say(text: str) -> None:
    # If stderr is closed, the job's exit status matters more than the message.
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
