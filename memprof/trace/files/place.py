"""Where output goes: to a file that is replaced whole, through a device or a pipe, or nowhere."""

from __future__ import annotations

import errno
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from memprof.errors import DiskFullError, OutputError
from memprof.trace.files.size_limit import explain_write_error

#: Links that are followed until they are taken for a circle, as the system does.
_MOST_LINKS = 40

#: How long a named pipe is given until somebody reads it.
_READER_WAIT_S = 10.0

#: What the system says when a disk fills up, or fails.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

#: What is neither a file nor written through, and how it is called.
_REFUSED = ((stat.S_ISDIR, "a folder"), (stat.S_ISSOCK, "a socket"), (stat.S_ISBLK, "a block device"))


@dataclass(frozen=True)
class Place:
    """Where output goes.

    Attributes:
        path: The name given.
        target: The file behind its links, which may not be there yet.
        is_there: Something is there already.
        is_stream: What is there is a character device, a pipe, or a descriptor of this process: written through.
        descriptor: The descriptor of this process that the name stands for (``/dev/stdout``, ``/dev/fd/3``), else -1.
    """

    path: Path
    target: Path
    is_there: bool = False
    is_stream: bool = False
    descriptor: int = -1

    def open_stream(self) -> int:
        """Opens what is written through.

        Returns:
            A descriptor to write to, of the caller's own.

        Raises:
            OutputError: It cannot be opened, or nobody reads the pipe.
        """
        try:
            if self.descriptor >= 0:
                return os.dup(self.descriptor)
            return _open_with_a_reader(self.target)
        except OSError as error:
            raise cannot_write(self.path, error) from None


def find_place(path: str | os.PathLike[str]) -> Place:
    """Looks where a name leads, through links.

    Args:
        path: The name. A link to a file stands for that file, and one to nothing for the file to be made there.

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
    """Refuses a place that cannot be written, before any work.

    Args:
        path: The name to write to.
        force: A file that is there may be replaced. What is written through needs no leave: nothing is replaced.
        option: How the name is given, such as ``-o``, for the advice.

    Returns:
        The place.

    Raises:
        OutputError: It cannot be written there, or a file is there that may not be replaced.
    """
    place = find_place(path)
    if not place.is_there and not place.target.parent.is_dir():
        raise OutputError(f"There is no folder {shown_folder(place)} to write {place.path.name} to.")
    refuse_existing(place, force=force, option=option)
    return place


def refuse_existing(place: Place, *, force: bool, option: str = "") -> None:
    """Refuses to replace a file without leave; see ``check_output``.

    Raises:
        OutputError: A file is there that may not be replaced.
    """
    if place.is_there and not place.is_stream and not force:
        advice = f" with {option}" if option else ""
        raise OutputError(f"{place.path} exists already. Replace it with -f, or choose another name{advice}.")
    refuse_protected(place)


def refuse_protected(place: Place) -> None:
    """Refuses to replace a file that is write-protected: renaming over it would pass by what it is protected from.

    Raises:
        OutputError: The file is there and may not be written.
    """
    if place.is_there and not place.is_stream and not os.access(place.target, os.W_OK):
        raise OutputError(
            f"{place.path} is write-protected: make it writable, or choose another name.", "it is write-protected"
        )


def shown_folder(place: Place) -> Path:
    """Returns the folder that is missing: the one of the name as given where that is it, else the one behind links."""
    return place.path.parent if not place.path.parent.is_dir() else place.target.parent


def cannot_write(path: str | os.PathLike[str], error: OSError) -> OutputError:
    """Returns the error for a place that the system does not let us write."""
    reason, way_out = explain_write_error(error, "Choose another place.")
    kind = DiskFullError if error.errno in _DISK else OutputError
    return kind(f"{path} cannot be written: {reason}. {way_out}", reason)


def _follow(path: Path) -> tuple[int, Path]:
    """Follows the links of a name to its end; returns the descriptor of this process that it is, else -1, and the end.

    One after the other, and not all at once: where a descriptor of this process is on the way (``/dev/stdout``), what
    is open there is written, from where it stands, and no file of the same name.
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
        except OSError:  # no link: the end
            return -1, current
    raise OutputError(f"{path} is a link that leads back to itself.")


def _mode(target: Path) -> int | None:
    """Returns what is there; None where nothing is."""
    try:
        return target.stat().st_mode
    except FileNotFoundError:
        return None


def _open_with_a_reader(target: Path) -> int:
    """Opens a device or a pipe; of a pipe nobody reads, the system says so at once when asked not to wait."""
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
