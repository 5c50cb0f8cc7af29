"""The system's limit on the size of a process's files (``ulimit -f``), and the messages about it."""

from __future__ import annotations

import errno

from memprof.hidden_import import import_hidden

try:
    _resource = import_hidden("resource")
except ImportError:  # not available on this system, which has no such limit
    _resource = None

_LIMIT = "the file size limit of this shell"


class FileSizeLimitError(OSError):
    """A recording would exceed the size limit on its process's files."""

    def __init__(self, limit_bytes: int) -> None:
        """Builds the message: the limit, and what to do about it.

        Args:
            limit_bytes: The limit in bytes.
        """
        super().__init__(
            errno.EFBIG,
            f"{_LIMIT} (ulimit -f, {_in_words(limit_bytes)}) ended the recording; raise it, or record less "
            "(--steps 1, or --light)",
        )

    def __str__(self) -> str:
        """Returns the message without the error number."""
        return str(self.strerror)


def file_size_limit() -> int | None:
    """Returns the current size limit in bytes on this process's files; None without a limit."""
    if _resource is None:
        return None
    limit: int = _resource.getrlimit(_resource.RLIMIT_FSIZE)[0]
    return limit if limit >= 0 else None


def explain_write_error(error: OSError, way_out: str) -> tuple[str, str]:
    """Explains why a file cannot be written.

    Args:
        error: The system's error.
        way_out: What to do if the file size limit is not the reason.

    Returns:
        The reason, and what to do about it.
    """
    limit = file_size_limit() if error.errno == errno.EFBIG else None
    if limit is not None:
        return f"{_LIMIT}, ulimit -f, is {_in_words(limit)}", "Raise it."
    return str(error.strerror or error), way_out


def describe_fault(fault: str) -> str:
    """Explains in one line what ended a recording.

    Args:
        fault: What the recorder wrote: a traceback, its last line, or the message of a `FileSizeLimitError`.
    """
    last = fault.strip().splitlines()[-1]
    return last if last.startswith(_LIMIT) else f"the recorder failed: {last}"


def _in_words(size_bytes: int) -> str:
    from memprof.units import format_bytes  # imported on use: it imports modules the job may not have imported

    return format_bytes(size_bytes)
