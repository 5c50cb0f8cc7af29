"""Every error memprof raises on purpose, with the exit code of its command.

The command line catches `MemprofError` once and prints only the message, so a message states what was read, what is
wrong with it and what to do.
"""

from __future__ import annotations


class MemprofError(Exception):
    """Base of all errors; raised directly only for internal errors of memprof (exit code 1)."""

    exit_code = 1


class UsageError(MemprofError):
    """Invalid request, such as a step that was not recorded (exit code 2)."""

    exit_code = 2


class OutputError(UsageError, OSError):
    """Output cannot be written: missing folder, no permission, or not a writable location (exit code 2).

    Also an ``OSError``, so that best-effort writers catch both.

    Attributes:
        reason: The cause, a clause without path and advice.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        """Takes the message, and the clause of it that gives the cause."""
        super().__init__(message)
        self.reason = reason or message.rstrip(".")


class DiskFullError(OutputError):
    """The output path was valid, but the disk filled up or failed during the write (exit code 1)."""

    exit_code = 1


class PolicyError(UsageError):
    """Invalid policy settings, or a policy incompatible with the model, step or machine (exit code 2)."""


class NoOptimizerError(PolicyError):
    """A policy needs an optimizer of the model's parameters, and none has been created yet (exit code 2)."""


class InconclusiveError(MemprofError):
    """The available data cannot answer the question, such as runs on different devices (exit code 3)."""

    exit_code = 3


class GateFailedError(MemprofError):
    """A limit the user set is exceeded (exit code 4)."""

    exit_code = 4


class BadInputError(MemprofError):
    """A file is missing, corrupt, empty, of another format, or written by a newer memprof (exit code 5)."""

    exit_code = 5


class NotStartedError(BadInputError):
    """A recording is empty so far, since its job is still before its first training step (exit code 5)."""


class InvariantError(MemprofError):
    """A recorded or transformed step is inconsistent: always an internal error of memprof (exit code 1)."""

    exit_code = 1
