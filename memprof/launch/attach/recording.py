"""A recording of jobs that are running: begun and ended in each of them, and packed here."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from memprof.errors import BadInputError
from memprof.launch.attach.injection import NoAnswerError
from memprof.launch.attach.session import Session
from memprof.launch.outcome.output import claim_output, spool_of, write_exit, write_launch
from memprof.launch.parent.settings import Settings
from memprof.launch.parent.target import Target
from memprof.trace.files.pack import PackResult, pack_spool
from memprof.units import format_count

#: Longest wait for a place where a recording can end without risk.
_END_S = 60.0


def record_running(
    sessions: Sequence[Session],
    output: Path,
    *,
    steps: int,
    light: bool,
    force: bool,
    say: Callable[[str], None],
) -> PackResult:
    """Records the next steps of processes of one job until they have passed, the job ends, or this is interrupted.

    Args:
        sessions: An open attach to each process.
        output: The file to write.
        steps: Steps to record.
        light: Follow all steps, until this is interrupted.
        force: Overwrite the file if it exists.
        say: Prints what is waited for.

    Raises:
        CannotAttachError: Several threads train.
        CannotStartError: The file may not be written.
        NoAnswerError: A process ended or did not answer.
        BadInputError: No step ended meanwhile.
    """
    for session in sessions:
        session.check_threads(in_one=True)
    process = sessions[0].process
    target = Target(process.command, _program_of(process.command))
    settings = Settings(output=output, force=force, quiet=True, skip=1, steps=steps, light=light)
    output = claim_output(target, settings, "")
    spool = spool_of(output).resolve()
    write_launch(spool, target, settings)
    with _interrupts() as is_interrupted:
        try:
            for session in sessions:
                session.ask("begin", spool=str(spool), steps=steps, light=light, lock=str(session.lock))
            what = (
                "until Ctrl-C or the job's end" if light else f"{format_count(steps, 'step')}, after one that passes,"
            )
            waits_for = "" if light else "the job's next steps"
            say(f"recording {what} to {output}; the job goes on")
            for session in sessions:
                with suppress(NoAnswerError):  # the job has ended: what it has written is packed
                    session.wait_for(partial(_is_over, session, is_interrupted), waits_for, None)
        finally:
            going_on = [session.process.pid for session in sessions if not _end(session)]
            if not any(spool.glob("process-*/")):
                shutil.rmtree(spool, ignore_errors=True)
    if not spool.exists():
        raise NoAnswerError(f"{output} is not written: no step of the job began meanwhile.")
    if going_on:
        pids = ", ".join(map(str, going_on))
        raise NoAnswerError(
            f"{output} is not written: process {pids} came to no place where the recording can end without risk, and "
            f"ends it by itself at the next one; until then memprof report {spool} reads it."
        )
    write_exit(spool, None, is_running=any(session.is_running() for session in sessions))
    try:
        return pack_spool(spool, output)
    except BadInputError:
        shutil.rmtree(spool, ignore_errors=True)
        raise


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Has Ctrl-C set a mark instead of raising, which the job's own handling of it would interrupt."""
    seen: list[int] = []
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            former = signal.signal(number, lambda got, _: seen.append(got))
            stack.callback(signal.signal, number, former)
        yield lambda: bool(seen)


def _is_over(session: Session, is_interrupted: Callable[[], bool] = lambda: False) -> bool:
    return is_interrupted() or (session.folder / f"over-{session.process.pid}").exists()


def _end(session: Session) -> bool:
    """Ends the recording of a process, and waits until its hooks are removed; returns whether they are."""
    try:
        if not _is_over(session) and session.is_running() and session.ask("end")["is_recording"]:
            session.wait_for(lambda: _is_over(session), "the job to end the recording", _END_S)
    except NoAnswerError:
        return not session.is_running()
    return True


def _program_of(command: Sequence[str]) -> str:
    """Returns the script or module of a command line of Python."""
    words = [word for word in command[1:] if not word.startswith("-")]
    return words[0] if words else command[0]
