"""Writes a file or a folder atomically; devices and pipes are written through."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from memprof.errors import OutputError
from memprof.trace.files.place import Place, cannot_write, find_place, refuse_protected
from memprof.trace.files.private_file import FILE_MODE, FOLDER_MODE, open_private

#: Bytes buffered in memory while writing to a device or a pipe; beyond that, a temporary file is used.
_IN_MEMORY_BYTES = 64 << 20


@contextmanager
def whole_file(path: Path, *, is_private: bool = False) -> Iterator[BinaryIO]:
    """Writes a file under a temporary name next to ``path`` and renames it, so that no partial file is ever visible.

    A link is kept, and its target is written. Other hard links of a replaced file keep the old content.
    A character device, a pipe and ``/dev/stdout`` are written through once the output is complete; folders, sockets and
    block devices are rejected.

    Args:
        path: The file to write or replace.
        is_private: It holds what a job was given, or where it ran: readable only by its owner, whatever the umask.

    Yields:
        The file to write to, positioned at its start.

    Raises:
        OutputError: The disk is full or read-only, the folder is missing ...
    """
    place = find_place(path)
    if place.is_stream:
        with _through(place) as file:
            yield file
        return
    refuse_protected(place)
    temporary = place.target.with_name(f".memprof-{os.urandom(6).hex()}.part")
    try:
        # Closing it flushes what a failed write left behind.
        with translated(path), _open_new(temporary, place, is_private=is_private) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with translated(path):
            if find_place(place.target).is_stream:  # nor is a file created there in the meantime replaced
                raise OutputError(f"{path} became a device or a pipe in the meantime, and was not replaced.")
            temporary.replace(place.target)
            _sync_folder(place.target.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _open_new(temporary: Path, place: Place, *, is_private: bool) -> BinaryIO:
    try:
        return open_private(temporary, "xb") if is_private else temporary.open("xb")
    except OSError as error:
        raise cannot_write(place.path, error) from None


@contextmanager
def _through(place: Place) -> Iterator[BinaryIO]:
    """Buffers the output and passes it on when complete: after a failure, nothing is written to the destination."""
    import shutil  # both imported here: the recorder writes files in the job, which gets no needless modules
    import tempfile

    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as gathered:
        with translated(place.path):
            yield cast(BinaryIO, gathered)
            gathered.seek(0)
        if sys.stdout is not None:
            sys.stdout.flush()  # keeps the order with what was printed earlier
        with os.fdopen(place.open_stream(), "wb") as stream:
            try:
                shutil.copyfileobj(gathered, stream)
                stream.flush()
            except OSError as error:
                with suppress(OSError):
                    stream.close()  # it holds what could not be written, and would retry
                if isinstance(error, BrokenPipeError) and place.descriptor >= 0:
                    raise  # the reader closed the pipe
                raise cannot_write(place.path, error) from None


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Converts a write error to an OutputError; an error that names another file is left as it is."""
    try:
        yield
    except OutputError:  # it is also an OSError
        raise
    except OSError as error:
        if error.filename is not None and ".memprof-" not in str(error.filename):
            raise
        raise cannot_write(path, error) from None


def _sync_folder(folder: Path) -> None:
    """Makes the rename survive a power failure; only POSIX allows opening a folder for it."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_folder(path: Path, *, is_private: bool = False) -> Iterator[Path]:
    """Fills a temporary folder next to ``path`` and renames it, so that no partial folder is ever visible.

    A link is kept, and its target is written. An existing folder at ``path`` is replaced once the new one is
    complete. The caller checks whether it may be replaced.

    Args:
        path: The folder to write or replace.
        is_private: It holds what a job was given, or where it ran: readable only by its owner, whatever the umask.

    Yields:
        The folder to fill.

    Raises:
        OutputError: The disk is full or read-only, the parent folder is missing, or something else exists there.
    """
    with translated(path):
        target = path.resolve()
    if os.path.lexists(target) and not target.is_dir():
        raise OutputError(f"{path} is not a folder and was left alone. Choose another name.")
    with translated(path), _filled(target, is_private=is_private) as folder:
        yield folder


@contextmanager
def _filled(path: Path, *, is_private: bool) -> Iterator[Path]:
    token = os.urandom(6).hex()  # a job that is attached to may have a module of its own named secrets
    temporary, old = (path.with_name(f".memprof-{token}.{end}") for end in ("part", "old"))
    temporary.mkdir(mode=FOLDER_MODE if is_private else 0o777)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())  # so that a full disk is noticed before the rename
            if is_private:
                file.chmod(FILE_MODE if file.is_file() else FOLDER_MODE)
        if path.is_dir():
            path.rename(old)
        try:
            temporary.rename(path)
        except OSError:
            if old.is_dir():
                old.rename(path)
            raise
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if old.is_dir():
        shutil.rmtree(old)
