"""Writes a file whole or not at all; devices, pipes and sockets are written to and never replaced."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from memprof.errors import OutputError
from memprof.trace.files.place import Place, cannot_write, find_place, refuse_protected
from memprof.trace.files.private_file import open_private

#: Bytes held in memory while writing to a device or a pipe; beyond that a temporary file holds them.
_IN_MEMORY_BYTES = 64 << 20


@contextmanager
def whole_file(path: Path, *, is_private: bool = False) -> Iterator[BinaryIO]:
    """Writes a file under a temporary name beside ``path`` and renames it, so that no half file is ever there.

    A link stays, and the file it leads to is written. Other hard links of a file that is replaced keep what they hold.
    A character device, a pipe and ``/dev/stdout`` are written through once all of it is there; folders, sockets and
    block devices are refused.

    Args:
        path: The file to write or replace.
        is_private: It holds what a job was given, or where it ran: nobody else may read it, whatever the umask is.

    Yields:
        The file to write to, at its beginning.

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
        # Closing it writes, too: what is left where a write has failed.
        with translated(path), _open_new(temporary, place, is_private=is_private) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with translated(path):
            if find_place(place.target).is_stream:  # what came to be there meanwhile is not replaced either
                raise OutputError(f"{path} was made a device or a pipe meanwhile, and stays.")
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
    """Gathers what is written, and hands it on when it is whole: a failure on the way leaves nothing there."""
    import shutil  # both here because the recorder writes files in the job, which gets no more modules than needed
    import tempfile

    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as gathered:
        with translated(place.path):
            yield cast(BinaryIO, gathered)
            gathered.seek(0)
        if sys.stdout is not None:
            sys.stdout.flush()  # what was printed before comes before
        with os.fdopen(place.open_stream(), "wb") as stream:
            try:
                shutil.copyfileobj(gathered, stream)
                stream.flush()
            except OSError as error:
                with suppress(OSError):
                    stream.close()  # it holds what could not be written, and would try again
                if isinstance(error, BrokenPipeError) and place.descriptor >= 0:
                    raise  # the reader of the output has seen enough
                raise cannot_write(place.path, error) from None


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Makes a sentence of what the system says of a write; an error that names another file is left as it is."""
    try:
        yield
    except OutputError:  # it is an OSError, too
        raise
    except OSError as error:
        if error.filename is not None and ".memprof-" not in str(error.filename):
            raise
        raise cannot_write(path, error) from None


def _sync_folder(folder: Path) -> None:
    """Makes the new name last through a power cut; only POSIX lets a folder be opened for it."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
