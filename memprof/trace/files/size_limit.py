"""The limit that the system puts on the size of a process's files (``ulimit -f``), and what is said of it."""

from __future__ import annotations

import errno

from memprof.hidden_import import import_hidden

try:
    _resource = import_hidden("resource")
except ImportError:  # not on this system, which has no such limit
    _resource = None

_LIMIT = "the file size limit of this shell"


class FileSizeLimitError(OSError):
    """A recording would grow beyond the size that the files of its process may have."""

    def __init__(self, limit_bytes: int) -> None:
        """Says what the limit is, and what to do about it.

        Args:
            limit_bytes: The limit.
        """
        super().__init__(
            errno.EFBIG,
            f"{_LIMIT} (ulimit -f, {_in_words(limit_bytes)}) ended the recording; raise it, or record less "
            "(--steps 1, or --light)",
        )

    def __str__(self) -> str:
        """Returns the sentence without the error's number."""
        return str(self.strerror)


def file_size_limit() -> int | None:
    """Returns the size in bytes that no file of this process may exceed, as it is now; None without a limit."""
    if _resource is None:
        return None
    limit: int = _resource.getrlimit(_resource.RLIMIT_FSIZE)[0]
    return limit if limit >= 0 else None


def explain_write_error(error: OSError, way_out: str) -> tuple[str, str]:
    """Says why a file cannot be written.

    Args:
        error: What the system said.
        way_out: What to do where the limit on the size of files is not the reason.

    Returns:
        The reason, and what to do about it.
    """
    limit = file_size_limit() if error.errno == errno.EFBIG else None
    if limit is not None:
        return f"{_LIMIT}, ulimit -f, is {_in_words(limit)}", "Raise it."
    return str(error.strerror or error), way_out


def describe_fault(fault: str) -> str:
    """Says in a line what ended a recording.

    Args:
        fault: What the recorder wrote: a traceback, its last line, or the sentence of a `FileSizeLimitError`.
    """
    last = fault.strip().splitlines()[-1]
    return last if last.startswith(_LIMIT) else f"the recorder failed: {last}"


def _in_words(size_bytes: int) -> str:
    from memprof.units import format_bytes  # at use: it imports what the job may not have imported

    return format_bytes(size_bytes)
