"""Files that only their owner may read, within the system's limit on their size (``ulimit -f``)."""

from __future__ import annotations

import errno
import os
from io import BufferedWriter
from pathlib import Path
from typing import IO, Any, Literal, TextIO, overload

from memprof.hidden_import import import_hidden

#: Permissions of such a file, and of a folder of them.
FILE_MODE, FOLDER_MODE = 0o600, 0o700
#: Bound at import: a job may replace them with its own, and count calls.
_open, _os_open = open, os.open


try:
    _resource = import_hidden("resource")
except ImportError:  # not available on this system, which has no such limit
    _resource = None

_LIMIT = "the file size limit of this shell"


class FileSizeLimitError(OSError):
    """A recording would exceed the size limit on its process's files."""

    def __init__(self, limit_bytes: int) -> None:
        """Builds the message: the limit, and what to do about it."""
        super().__init__(
            errno.EFBIG,
            f"{_LIMIT} (ulimit -f, {_in_words(limit_bytes)}) ended the recording; raise it, or record less "
            "(--steps 1, or --light)",
        )

    def __str__(self) -> str:
        """Returns the message without the error number."""
        return str(self.strerror)


def user_folder(variable: str, default: str) -> Path:
    """Returns a folder of this user's (XDG Base Directory Specification).

    Args:
        variable: The environment variable that names it, such as ``XDG_CACHE_HOME``; a relative path is ignored.
        default: Where it is otherwise, below the home folder.
    """
    given = Path(os.environ.get(variable, ""))
    return given if given.is_absolute() else Path("~").expanduser() / default


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


@overload
def open_private(path: str | os.PathLike[str], mode: Literal["xb"]) -> BufferedWriter: ...
@overload
def open_private(path: str | os.PathLike[str], mode: Literal["w", "a"] = "w", **options: str) -> TextIO: ...
def open_private(path: str | os.PathLike[str], mode: str = "w", **options: Any) -> IO[Any]:
    """Opens a file as ``open`` does; a file it creates is readable only by its owner.

    Raises:
        OSError: It cannot be opened.
    """
    return _open(path, mode, opener=lambda name, flags: _os_open(name, flags, FILE_MODE), **options)


def write_private(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text to a file readable only by its owner.

    Raises:
        OSError: It cannot be written.
    """
    with open_private(path, encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def make_private_folder(path: Path) -> None:
    """Creates a folder readable only by its owner, and missing parent folders; an existing one is kept.

    Raises:
        OSError: It cannot be created.
    """
    if not path.parent.exists():
        make_private_folder(path.parent)  # with parents=True, those would follow the umask
    path.mkdir(mode=FOLDER_MODE, exist_ok=True)
