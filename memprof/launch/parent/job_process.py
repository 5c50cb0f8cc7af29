"""Runs a job's process, or those of its ranks, under the recorder, and passes signals on to it."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

from memprof.errors import MemprofError
from memprof.launch.parent.environment import recording_environment
from memprof.launch.parent.group_anchor import GroupAnchor
from memprof.launch.parent.host import HostSampler
from memprof.launch.parent.no_driver import stand_in_for_tools
from memprof.launch.parent.relay import SignalRelay
from memprof.launch.parent.settings import Settings
from memprof.launch.parent.target import CannotStartError, NotExecutableError, NotFoundError, Target


def run_job(
    target: Target,
    settings: Settings,
    spool: Path,
    stdout: int | None = None,
    stderr: int | None = None,
    within: tuple[str, ...] = (),
) -> tuple[int, frozenset[int]]:
    """Runs the job; returns its exit status, and the signals that reached this process meanwhile.

    Args:
        target: What to run.
        settings: How to record it.
        spool: The recording's spool folder.
        stdout: File descriptor for the job's output; None for this process's own.
        stderr: The same for its errors.
        within: Command prefix: the program and its arguments that exec the job's command line.

    Raises:
        CannotStartError: No process can be started.
        NotExecutableError: The target cannot be run.
        NotFoundError: The target does not exist.
    """
    environment = recording_environment(os.environ, spool.resolve(), settings)
    command = [*within, *target.arguments]
    try:
        environment = stand_in_for_tools(environment, spool.resolve(), settings.device)
        with SignalRelay() as relay:
            if settings.ranks:
                from memprof.launch.dry.rank_runs import RankRuns  # only few jobs need it

                runs = RankRuns(command, environment, spool, settings.ranks, settings.nodes, target.name)
                with GroupAnchor():
                    return runs.run(relay, stdout, stderr), frozenset(relay.arrived)
            # File descriptors beyond stderr are inherited by the job: process substitution, make's job server.
            job = subprocess.Popen(command, env=environment, close_fds=False, stdout=stdout, stderr=stderr)
            sampler = HostSampler(spool, job.pid)
            while job.poll() is None:
                sampler.sample_if_due()
                relay.wait(sampler.seconds_to_next(), job.send_signal)
            relay.wait(0.0, lambda _: None)  # signals that arrived as the job ended are recorded, not sent
            return job.returncode, frozenset(relay.arrived)
    except OSError as error:
        raise _start_error(target, error) from None


def _start_error(target: Target, error: OSError) -> MemprofError:
    program = target.arguments[0]
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        # The program existed a moment ago; the interpreter in its shebang is missing.
        return NotFoundError(f"{program} cannot be run: its interpreter is missing ({error.strerror}).")
    if error.errno in (errno.EACCES, errno.ENOEXEC, errno.EPERM):
        return NotExecutableError(f"{program} cannot be run: {error.strerror}.")
    return CannotStartError(f"{program} cannot be started: {error.strerror}.")
