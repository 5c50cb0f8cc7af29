"""Runs a job's process, or those of its ranks, under the recorder, and passes signals on to it."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from memprof.errors import MemprofError
from memprof.launch.parent.host import HostSampler
from memprof.launch.parent.relay import RELAYED, SignalRelay
from memprof.launch.parent.settings import Settings
from memprof.launch.parent.target import (
    CannotStartError,
    NotExecutableError,
    NotFoundError,
    Target,
    first_of,
    ranks_of,
    threads_of,
)
from memprof.trace.files.private_file import FOLDER_MODE


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


_BOOTSTRAP = str(Path(__file__).resolve().parents[1] / "bootstrap")
_PACKAGE = str(Path(__file__).resolve().parents[2])


def recording_environment(environment: Mapping[str, str], spool: Path, settings: Settings) -> dict[str, str]:
    """Adds the bootstrap's variables to an environment.

    Args:
        environment: The environment the job would have without memprof.
        spool: Folder to which the recorders of all processes write.
        settings: What to record.

    Returns:
        A new environment, without the variables of an enclosing recording.
    """
    # An empty PYTHONPATH means none; an empty entry in one means the current folder, so it must not arise here.
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path != _BOOTSTRAP]
    python_path = os.pathsep.join([_BOOTSTRAP, *paths]) if environment.get("PYTHONPATH") and paths else _BOOTSTRAP
    child: dict[str, Any] = {"skip": settings.skip, "steps": settings.steps, "stop": settings.stop}
    if settings.whole:
        child["whole"] = True
    if settings.goes_on:
        child["goes_on"] = True
    if settings.light:
        child["light"] = True
    if settings.dry_run:
        child["dry_run"] = True
        child["device"] = settings.device
        child["strict"] = settings.strict
        if settings.ranks:
            child["ranks"] = settings.ranks
            child["nodes"] = settings.nodes
        child["expert_load"] = settings.expert_load
        if ranks_of(settings.plan) > 1:
            child["devices"] = 1  # --shard gives each rank a machine of one device
        if settings.survey is not None:
            child["survey"], child["survey_s"] = str(settings.survey), settings.survey_s
        if settings.snapshots is not None:
            child["snapshots"], child["snapshot_name"] = str(settings.snapshots), settings.snapshot_name
    variables: dict[str, str] = {}
    if settings.plan is not None:
        from memprof.policies.plan.plan_file import format_plan  # imported here: a recording without a plan stays small

        child["plan"] = format_plan(settings.plan)
        ranks = ranks_of(settings.plan)
        variables = {**settings.plan.environment(), **threads_of(ranks, environment)}
        if settings.dry_run:
            variables |= first_of(ranks, environment)
    return {
        **environment,
        **variables,
        "PYTHONPATH": python_path,
        "MEMPROF_SPOOL": str(spool),
        "MEMPROF_SETTINGS": json.dumps(child),
        "MEMPROF_PACKAGE": _PACKAGE,
    }


# Keeps a job in the background alive when its shell exits while some of its processes are stopped.
#
# A process group is orphaned when no member has a parent in another group of the session, as the shell was. Where a
# member is stopped at that moment, the system hangs up all of them (POSIX, ``_exit``): nothing could continue it.
# Ranks are stopped for a different reason, while others have their turn.


class GroupAnchor:
    """A member of this process's group whose parent is in another group, until the context manager is left.

    It goes when the job itself is stopped, as by Ctrl-Z: that is for the shell and the system to handle.
    """

    def __enter__(self) -> Self:
        """Starts the member and its parent.

        Raises:
            OSError: The system has no process or pipe left.
        """
        life, self._life = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._life)
            _be_parent(life, os.getpgrp())
        os.close(life)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._life)
        os.waitpid(self._pid, 0)


def _be_parent(life: int, group: int) -> NoReturn:
    """Starts the member in a group, and ends when it ends or is stopped.

    Args:
        life: The read end of a pipe whose other end closes with the process that is anchored.
        group: The group.
    """
    try:
        signal.set_wakeup_fd(-1)
        for number in RELAYED:
            signal.signal(number, signal.SIG_IGN)
        os.setpgid(0, 0)
        member = os.fork()
        if member:
            os.waitpid(member, os.WUNTRACED)
        else:
            os.setpgid(0, group)
            os.read(life, 1)
    finally:
        os._exit(0)


_NAME, _FOLDER = "nvidia-smi", "programs"
#: What the real program returns where no driver is loaded: it is called with options to read its numbers.
_NO_DRIVER = 9
_SCRIPT = """#!/bin/sh
echo {sentence}
[ $# -eq 0 ] || exit {status}
"""


def stand_in_for_tools(environment: Mapping[str, str], spool: Path, device: str) -> dict[str, str]:
    """Returns an environment in whose PATH nvidia-smi is found, at the end; unchanged where it is installed.

    Args:
        environment: The job's environment.
        spool: The recording's spool folder, which receives the program.
        device: The virtual device; "" for none.

    Raises:
        OSError: The program cannot be written.
    """
    path = environment.get("PATH", os.defpath)
    if not device or shutil.which(_NAME, path=path):
        return dict(environment)
    folder = spool / _FOLDER
    folder.mkdir(mode=FOLDER_MODE)
    sentence = f"memprof: dry run on a virtual {device}, without a driver"
    program = folder / _NAME
    program.write_text(_SCRIPT.format(sentence=shlex.quote(sentence), status=_NO_DRIVER), encoding="utf-8")
    program.chmod(0o700)
    return {**environment, "PATH": f"{path}{os.pathsep}{folder}"}
