"""A job that runs under the recorder: from the claim of its output to the packed recording."""

from __future__ import annotations

import shutil
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from memprof.errors import BadInputError, MemprofError, OutputError
from memprof.launch.outcome.memory_end import KillerWatch, describe_unrecorded
from memprof.launch.outcome.output import add_speed, claim_output, spool_of, write_exit, write_launch
from memprof.launch.outcome.plan_marks import read_applied, read_fault, read_idle, read_refusal
from memprof.launch.outcome.verdict import Verdict, describe_missed, describe_nothing, describe_recording
from memprof.launch.own_files import read_own_files
from memprof.launch.parent.job_process import run_job
from memprof.launch.parent.settings import Settings
from memprof.launch.parent.target import Target
from memprof.launch.torch_versions import describe_newer
from memprof.trace.files.spool import RAN_OUT

if TYPE_CHECKING:
    pass


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
    ends = [*describe_unrecorded(spool), *([killed] if killed else [])]
    own_files = read_own_files(spool, begun.started)
    verdict = _pack(spool, output, target, returncode, killed)
    verdict = replace(verdict, post_mortem=tuple(dict.fromkeys([*ends, *verdict.post_mortem])))
    if verdict.is_interrupted:
        signals |= {signal.SIGINT}
    return Recorded(
        output,
        returncode,
        verdict,
        missed=tuple(missed),
        fault=fault,
        own_files=own_files,
        was_killed=killed.startswith(RAN_OUT),
        signals=signals,
        warning=warning,
    )


def _pack(spool: Path, output: Path, target: Target, returncode: int, killed: str) -> Verdict:
    try:
        if not any(spool.glob("process-*/")):
            return _discard(spool, output, target, returncode)
        write_exit(spool, returncode, killed)
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


def _discard(spool: Path, output: Path, target: Target, returncode: int) -> Verdict:
    verdict = describe_nothing(spool, target.name, returncode)
    # With -f an older file may exist. If kept, it would be mistaken for this run's.
    output.unlink(missing_ok=True)
    shutil.rmtree(spool, ignore_errors=True)
    return verdict
