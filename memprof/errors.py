"""Every error memprof raises on purpose, each with the exit code its command ends with.

The command line catches `MemprofError` once and prints the message alone, so a message says what was read,
what is wrong with it and what to do.
"""

from __future__ import annotations


class MemprofError(Exception):
    """Base of all errors; raised itself only for faults of memprof's own (exit code 1)."""

    exit_code = 1


class UsageError(MemprofError):
    """What was asked for makes no sense, such as a step that was not recorded (exit code 2)."""

    exit_code = 2


class OutputError(UsageError, OSError):
    """What was to be written cannot be: no such folder, no permission, a place that cannot hold a file (exit code 2).

    It is an ``OSError`` too, so that whoever writes best-effort catches both alike.

    Attributes:
        reason: Why, a clause without the place and the advice.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        """Takes the sentence, and of it the clause that says why."""
        super().__init__(message)
        self.reason = reason or message.rstrip(".")


class DiskFullError(OutputError):
    """The place was fine, and the disk filled up or failed under the writing (exit code 1)."""

    exit_code = 1


class PolicyError(UsageError):
    """A policy's settings make no sense, or it does not fit the model, the step or the machine (exit code 2)."""


class NoOptimizerError(PolicyError):
    """A policy needs an optimizer of the model's parameters, and none has been made so far (exit code 2)."""


class InconclusiveError(MemprofError):
    """The question cannot be answered from what is there, such as runs on different devices (exit code 3)."""

    exit_code = 3


class GateFailedError(MemprofError):
    """A limit the user set is exceeded (exit code 4)."""

    exit_code = 4


class BadInputError(MemprofError):
    """A file is missing, corrupt, empty, foreign, or written by a newer memprof (exit code 5)."""

    exit_code = 5


class InvariantError(MemprofError):
    """A recorded or transformed step contradicts itself: always a fault of memprof's own (exit code 1)."""

    exit_code = 1
