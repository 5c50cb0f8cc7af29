"""Starts the processes of dry-run ranks: forked from one that has imported torch where possible, else each anew."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from memprof.launch.dry.apart import SCRATCH

#: Environment variable of the process that forks ranks: the number of its end of the socket.
FORK = "MEMPROF_FORK"
#: If 0, each rank imports torch itself.
FORKS_RANKS = "MEMPROF_FORK_RANKS"


class RankProcess(Protocol):
    """A running rank."""

    @property
    def pid(self) -> int:
        """Its process id; 0 if it has none yet."""

    def poll(self) -> int | None:
        """Returns its exit status, negative for a signal; None while it runs."""

    def send_signal(self, number: int) -> None:
        """Sends it a signal, unless it has ended."""

    def wait(self) -> int:
        """Waits for its end; returns the exit status."""


class FreshRanks:
    """Ranks that each import torch."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], stdout: int | None, stderr: int | None
    ) -> None:
        """Starts nothing yet.

        Args:
            command: Command line of each rank.
            environment: Their environment, without the variables that differ between ranks.
            stdout: File descriptor for the output of rank 0; None for this process's own. Others' is discarded.
            stderr: The same for errors.
        """
        self._command, self._environment = list(command), dict(environment)
        self._stdout, self._stderr = stdout, stderr

    def start(self, rank: int, variables: Mapping[str, str], errors: Path | None) -> RankProcess:
        """Starts a rank."""
        environment = {**self._environment, **variables}
        if errors is None:
            return self.popen(environment)
        nothing = subprocess.DEVNULL
        scratch = environment.pop(SCRATCH, "")
        command = [*(command_apart(Path(scratch)) if scratch else ()), *self._command]
        with open(errors, "wb") as file:
            return subprocess.Popen(command, env=environment, stdin=nothing, stdout=nothing, stderr=file)

    def popen(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts a process whose output is shown."""
        return subprocess.Popen(
            self._command, env=dict(environment), close_fds=False, stdout=self._stdout, stderr=self._stderr
        )

    def close(self) -> None:
        """Does nothing: all processes are ranks."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The ranks' common environment."""
        return self._environment


class ForkedRanks:
    """Ranks forked from one process that has imported torch; started anew where that process cannot fork."""

    def __init__(self, fresh: FreshRanks) -> None:
        """Starts the process that forks.

        Args:
            fresh: Starts ranks anew.
        """
        self._fresh = fresh
        self._socket, theirs = socket.socketpair()
        with theirs:
            theirs.set_inheritable(True)
            self._server = fresh.popen({**fresh.environment, FORK: str(theirs.fileno())})
        self._socket.setblocking(False)
        self._received = b""
        self._ranks: dict[int, _ForkedRank] = {}
        self._is_over = False

    def start(self, rank: int, variables: Mapping[str, str], errors: Path | None) -> RankProcess:
        """Starts a rank; arguments are those of ``FreshRanks.start``."""
        request = {"rank": rank, "environment": dict(variables), "errors": str(errors or "")}
        if not self._is_over:
            try:
                self._socket.sendall(json.dumps(request).encode() + b"\n")
            except OSError:
                self._is_over = True
        started = _ForkedRank(self, lambda: self._fresh.start(rank, variables, errors))
        self._ranks[rank] = started
        return started

    def close(self) -> None:
        """Ends the process that forks."""
        self._socket.close()
        self._server.wait()

    def read(self) -> None:
        """Reads which ranks were forked, and which have ended."""
        while not self._is_over:
            try:
                received = self._socket.recv(65_536)
            except BlockingIOError:
                break
            except OSError:
                received = b""
            self._received += received
            self._is_over = not received
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            message = json.loads(line)
            self._ranks[message["rank"]].note(message)

    def wait(self) -> None:
        """Waits for a message."""
        select.select([self._socket], [], [])

    @property
    def is_over(self) -> bool:
        """Whether no rank can be forked any more."""
        return self._is_over

    @property
    def fresh(self) -> FreshRanks:
        """Starts ranks without a fork."""
        return self._fresh

    @property
    def server(self) -> subprocess.Popen[bytes]:
        """The process that forks."""
        return self._server


class _ForkedRank:
    """A rank that was requested; the process that forks may not have started it yet."""

    def __init__(self, ranks: ForkedRanks, start_anew: Callable[[], RankProcess]) -> None:
        self._ranks, self._start_anew = ranks, start_anew
        self._pid = 0
        self._status: int | None = None
        self._anew: RankProcess | None = None
        #: Signals sent before it was forked: the process that forks ends with them only while it imports torch.
        self._early: list[int] = []

    @property
    def pid(self) -> int:
        return self._pid if self._anew is None else self._anew.pid

    def note(self, message: Mapping[str, Any]) -> None:
        self._status = message.get("status", self._status)
        self._pid = message.get("pid", self._pid)
        while self._early and self._status is None:
            _send(self._pid, self._early.pop(0))

    def poll(self) -> int | None:
        self._ranks.read()
        if self._anew is None and self._status is None and self._ranks.is_over:
            ended = self._ranks.server.wait()
            if self._pid or ended < 0:
                self._status = ended or 1
                for number in (signal.SIGTERM, signal.SIGCONT) if self._pid else ():
                    _send(self._pid, number)  # nothing reports its end any more
            else:
                self._anew = self._start_anew()
        return self._status if self._anew is None else self._anew.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is not None:
            return
        if self._anew is not None:
            self._anew.send_signal(number)
        elif self._pid:
            _send(self._pid, number)
        else:
            self._early.append(number)
            self._ranks.server.send_signal(number)

    def wait(self) -> int:
        while (status := self.poll()) is None:
            if self._anew is not None:
                return self._anew.wait()
            self._ranks.wait()
        return status


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def start_ranks(
    command: Sequence[str], environment: Mapping[str, str], stdout: int | None, stderr: int | None
) -> FreshRanks | ForkedRanks:
    """Returns what starts ranks of a job; arguments are those of ``FreshRanks``.

    Only a script or module under a Python of its own is forked: another command may start several processes.
    """
    fresh = FreshRanks(command, environment, stdout, stderr)
    is_plain = len(command) > 1 and command[0] == sys.executable and (command[1] == "-m" or command[1][:1] != "-")
    if not (is_plain and _can_fork()) or environment.get(FORKS_RANKS, "") == "0":
        return fresh
    return ForkedRanks(fresh)


def _can_fork() -> bool:
    """Returns whether this system can fork ranks, and reports when they end (Linux 5.3)."""
    if not (hasattr(os, "fork") and hasattr(os, "pidfd_open") and os.path.isdir("/proc/self/task")):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an older kernel, or one that forbids it
        return False
    return True


#: The isolating script, which imports nothing of memprof.
_PROGRAM = str(Path(__file__).with_name("apart.py"))
_LIMIT_S = 20


def command_apart(scratch: Path) -> tuple[str, ...]:
    """Returns the command prefix that isolates a command.

    Args:
        scratch: A folder for redirected writes, outside the current one. A subfolder is created in it.

    Raises:
        OSError: The subfolder cannot be created.
    """
    files = scratch / "apart"
    files.mkdir(mode=0o700)
    return (sys.executable, "-I", "-S", _PROGRAM, str(files))


def why_not_apart() -> str:
    """Returns why isolation fails in the current folder on this machine; "" if a trial succeeds."""
    if sys.platform != "linux":
        return "only Linux can"
    try:
        with tempfile.TemporaryDirectory(prefix="memprof-apart-") as scratch:
            tried = subprocess.run(
                command_apart(Path(scratch)), capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["the system does not say why"])[-1]
