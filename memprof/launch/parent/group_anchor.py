"""Keeps a job in the background alive when its shell exits while some of its processes are stopped.

A process group is orphaned when no member has a parent in another group of the session, as the shell was. Where a
member is stopped at that moment, the system hangs up all of them (POSIX, ``_exit``): nothing could continue it.
Ranks are stopped for a different reason, while others have their turn.
"""

from __future__ import annotations

import os
import signal
from types import TracebackType
from typing import NoReturn, Self

from memprof.launch.parent.relay import RELAYED


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
        """Ends both."""
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
