"""Forwards signals sent only to the parent to the job, and not those that the job receives anyway."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")

#: Signals that schedulers, shells and users send to a job. Stop and continue are left to the system: a terminal sends
#: them to the whole process group. Windows, where recordings are only read, lacks some.
RELAYED = tuple(signal.Signals[name] for name in _NAMES if name in signal.Signals.__members__)

#: Signals that ask the whole command to end; other signals concern only the job.
ENDING = frozenset(number for number in RELAYED if not number.name.startswith("SIGUSR"))

#: How long a signal waits for evidence that the whole process group received it, in seconds.
_PATIENCE_S = 0.2


#: More descriptors than a launcher ever has open. The system's own limit can be a billion.
_MANY_DESCRIPTORS = 65_536


class SignalRelay:
    """Relays the signals that reach this process while a job runs in the same process group.

    Ctrl-C in a terminal, ``kill %1`` and ``timeout`` signal the whole group, so the job has already received the signal
    and a second one would be a different event: torchrun, for one, abandons its workers on a second SIGTERM.
    ``kill PID`` and a supervisor signal this process alone, so it must be forwarded. The system does not distinguish
    the two cases, so a witness does: a process of the same group that nothing else signals, which therefore receives
    a signal only together with the group.

    Use it as a context manager from the main thread. While entered, none of these signals ends this process; those
    that were ignored before stay ignored, here and in the job.

    Attributes:
        arrived: Signals that reached this process, whether or not others received them.
    """

    def __init__(self) -> None:
        """Creates the relay; nothing changes before it is entered."""
        self.arrived: set[int] = set()
        self._previous: dict[int, Any] = {}
        self._waiting: dict[int, float] = {}
        self._seen_in_group: dict[int, float] = {}

    def __enter__(self) -> Self:
        """Installs the handlers and starts the witness.

        Raises:
            OSError: The system has no process or pipe left.
        """
        self._arrivals, arrivals_end = _pipe()
        self._reports, reports_end = _pipe()
        witness_life, self._witness_life = os.pipe()
        self._pipes = [self._arrivals, arrivals_end, self._reports]
        self._previous_wakeup = signal.set_wakeup_fd(arrivals_end, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *RELAYED):
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, _take_note)
        self._witness = os.fork()
        if self._witness == 0:
            _witness(witness_life, reports_end)
        os.close(witness_life)
        os.close(reports_end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._witness_life)
        os.waitpid(self._witness, 0)
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        for descriptor in self._pipes:
            os.close(descriptor)

    def wait(self, timeout_s: float, send: Callable[[int], None]) -> None:
        """Sleeps until a signal arrives, a child ends or the time is over, and forwards signals that are due.

        Args:
            timeout_s: Maximum time to sleep, in seconds.
            send: Sends a signal to the job.
        """
        now = time.monotonic()
        due = min(self._waiting.values(), default=now + timeout_s)
        readable, _, _ = select.select([self._arrivals, self._reports], [], [], max(0.0, min(timeout_s, due - now)))
        now = time.monotonic()
        if self._reports in readable:
            self._group_got(os.read(self._reports, 4096), now)
        if self._arrivals in readable:
            for number in os.read(self._arrivals, 4096):
                if number in RELAYED:
                    self.arrived.add(number)
                if number in RELAYED and now - self._seen_in_group.get(number, -1.0) > _PATIENCE_S:
                    self._waiting.setdefault(number, now + _PATIENCE_S)
        for number in [number for number, deadline in self._waiting.items() if deadline <= now]:
            del self._waiting[number]
            send(number)

    def _group_got(self, numbers: bytes, now: float) -> None:
        for number in numbers:
            self._seen_in_group[number] = now
            self._waiting.pop(number, None)
        if not numbers:
            # The witness was killed. From here on every signal counts as sent to this process alone.
            self._pipes.remove(self._reports)
            os.close(self._reports)
            self._reports, silent_end = _pipe()
            self._pipes += [self._reports, silent_end]


def _pipe() -> tuple[int, int]:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    return reading, writing


def _take_note(number: int, frame: FrameType | None) -> None:
    """Does nothing: the interpreter has written the number to the wake-up pipe already."""


def _witness(life: int, reports: int) -> None:
    """Reports signals until the parent's end of ``life`` is closed, also by its death. Never returns."""
    try:
        os.dup2(life, 0)
        os.dup2(reports, 1)
        # Readers of the job's output must not wait for this process to close the pipe.
        os.closerange(2, min(os.sysconf("SC_OPEN_MAX"), _MANY_DESCRIPTORS))
        signal.set_wakeup_fd(1, warn_on_full_buffer=False)
        os.read(0, 1)
    finally:
        os._exit(0)
