"""The destination of output: a file that is replaced atomically, a device or pipe, or an invalid one."""

from __future__ import annotations

import errno
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from memprof.errors import DiskFullError, OutputError
from memprof.trace.files.private_file import explain_write_error

#: Number of links after which a cycle is assumed, as in the operating system.
_MOST_LINKS = 40

#: How long to wait for a reader of a named pipe.
_READER_WAIT_S = 10.0

#: Error codes for a full or failing disk.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

#: File types that can be neither replaced nor written through, and their names.
_REFUSED = ((stat.S_ISDIR, "a folder"), (stat.S_ISSOCK, "a socket"), (stat.S_ISBLK, "a block device"))


@dataclass(frozen=True)
class Place:
    """A destination of output.

    Attributes:
        path: The name as given.
        target: The file after resolving links; it may not exist.
        is_there: Something exists there.
        is_stream: It is a character device, a pipe, or a descriptor of this process: written through.
        descriptor: This process's descriptor that the name refers to (``/dev/stdout``, ``/dev/fd/3``), else -1.
    """

    path: Path
    target: Path
    is_there: bool = False
    is_stream: bool = False
    descriptor: int = -1

    def open_stream(self) -> int:
        """Opens a destination that is written through.

        Returns:
            A descriptor to write to, owned by the caller.

        Raises:
            OutputError: It cannot be opened, or the pipe has no reader.
        """
        try:
            if self.descriptor >= 0:
                return os.dup(self.descriptor)
            return _open_with_a_reader(self.target)
        except OSError as error:
            raise cannot_write(self.path, error) from None


def find_place(path: str | os.PathLike[str]) -> Place:
    """Resolves a name through links.

    Args:
        path: The name. A link to a file refers to that file, and a dangling link to the file to be created there.

    Raises:
        OutputError: It is a folder, a socket or a block device, or cannot be reached.
    """
    path = Path(path)
    try:
        descriptor, target = _follow(path)
        if descriptor >= 0:
            return Place(path, target, is_there=True, is_stream=True, descriptor=descriptor)
        mode = _mode(target)
    except OSError as error:
        raise cannot_write(path, error) from None
    except ValueError as error:  # a null character in the name
        raise OutputError(f"{path} cannot be written: {error}.", str(error)) from None
    if mode is None:
        return Place(path, target)
    for is_kind, kind in _REFUSED:
        if is_kind(mode):
            raise OutputError(f"{path} is {kind}, not a file: choose another name.", f"it is {kind}")
    return Place(path, target, is_there=True, is_stream=not stat.S_ISREG(mode))


def check_output(path: str | os.PathLike[str], *, force: bool, option: str = "") -> Place:
    """Rejects a destination that cannot be written, before any work is done.

    Args:
        path: The name to write to.
        force: An existing file may be replaced. Not needed to write through, as that replaces nothing.
        option: The option that sets the name, such as ``-o``, for the advice.

    Returns:
        The destination.

    Raises:
        OutputError: It cannot be written, or a file exists there and may not be replaced.
    """
    place = find_place(path)
    if not place.is_there and not place.target.parent.is_dir():
        folder = place.path.parent if not place.path.parent.is_dir() else place.target.parent  # where its links lead
        raise OutputError(f"no folder {folder} to write {place.path.name} to: create it first.")
    refuse_existing(place, force=force, option=option)
    return place


def refuse_existing(place: Place, *, force: bool, option: str = "") -> None:
    """Rejects replacing a file without permission; see ``check_output``.

    Raises:
        OutputError: A file exists there and may not be replaced.
    """
    if place.is_there and not place.is_stream and not force:
        advice = f" with {option}" if option else ""
        raise OutputError(f"{place.path} exists already. Replace it with -f, or choose another name{advice}.")
    refuse_protected(place)


def refuse_protected(place: Place) -> None:
    """Rejects replacing a write-protected file: a rename over it would bypass the protection.

    Raises:
        OutputError: The file exists and may not be written.
    """
    if place.is_there and not place.is_stream and not os.access(place.target, os.W_OK):
        raise OutputError(
            f"{place.path} is write-protected: make it writable, or choose another name.", "it is write-protected"
        )


def cannot_write(path: str | os.PathLike[str], error: OSError, advice: str = "Choose another place.") -> OutputError:
    """Returns the error for a destination that the system does not permit writing."""
    reason, way_out = explain_write_error(error, advice)
    kind = DiskFullError if error.errno in _DISK else OutputError
    return kind(f"{path} cannot be written: {reason}. {way_out}", reason)


def _follow(path: Path) -> tuple[int, Path]:
    """Follows the links of a name to the end; returns this process's descriptor it refers to, else -1, and the end.

    Links are followed one by one rather than resolved at once: where a descriptor of this process is on the way
    (``/dev/stdout``), the open file is written from its current position, not a file of the same name.
    """
    current = path.absolute()
    own = (Path("/dev/fd"), Path("/proc/self/fd").resolve(), Path("/proc/thread-self/fd").resolve())
    for _ in range(_MOST_LINKS):
        folder, name = current.parent.resolve(), current.name
        if folder in own and name.isdecimal():
            return int(name), current
        current = folder / name
        try:
            current = folder / current.readlink()
        except OSError:  # not a link: the end
            return -1, current
    raise OutputError(f"{path} is a circular link.")


def _mode(target: Path) -> int | None:
    """Returns the mode of what exists there; None where nothing does."""
    try:
        return target.stat().st_mode
    except FileNotFoundError:
        return None


def _open_with_a_reader(target: Path) -> int:
    """Opens a device or a pipe. The non-blocking open of a pipe without a reader fails at once, and is retried."""
    deadline = time.monotonic() + _READER_WAIT_S
    while True:
        try:
            opened = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            if not target.is_fifo():
                raise
            if time.monotonic() > deadline:
                raise OSError(error.errno, f"nobody reads this pipe (waited {_READER_WAIT_S:.0f} s)") from None
            time.sleep(0.02)
            continue
        os.set_blocking(opened, True)
        return opened
