"""The uncompressed zip around a trace: written whole or not at all, and read without trusting it."""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from memprof.errors import BadInputError
from memprof.trace.whole_file import whole_file

#: What reading a damaged or hostile zip raises.
_DAMAGE = (zipfile.BadZipFile, struct.error, EOFError, NotImplementedError, RuntimeError, OverflowError, ValueError)

_ZIP_START = b"PK\x03\x04"

#: How files start that are given by mistake, and what to say of them.
_FOREIGN = (
    (b"\x80", "it looks like a PyTorch memory snapshot: memprof import makes a recording of it"),
    (b"{", "it looks like JSON: of a profiler's trace, memprof import makes a recording"),
    (b"[", "it looks like JSON: of a profiler's trace, memprof import makes a recording"),
    (b"<", "it looks like HTML; was a web page saved in its place?"),
    (b"PAR1", "it is a single Parquet table"),
    (b"\x1f\x8b", "it is compressed with gzip: of a profiler's trace, memprof import makes a recording"),
)


def damaged(path: Path, detail: str) -> BadInputError:
    """Returns the error for a trace that is damaged."""
    return BadInputError(f"{path} is damaged: {detail}.")


def foreign(path: Path, detail: str) -> BadInputError:
    """Returns the error for a file that never was a trace."""
    return BadInputError(f"{path} is not a memprof trace: {detail}.")


def unreadable(path: Path, error: Exception) -> BadInputError:
    """Returns the error for a file the system does not let us read."""
    return BadInputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.")


def write_archive(path: Path, entries: Iterable[tuple[str, bytes]]) -> None:
    """Writes a zip, whole or not at all.

    The same entries give the same bytes.

    Args:
        path: The file to write or replace.
        entries: Name and content of each, in order.

    Raises:
        OSError: The disk is full or read-only, the folder is missing ...
    """
    with whole_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries:
            archive.writestr(_entry(name), content)
    _sync_folder(path.parent)


def read_entry(path: Path, name: str) -> bytes:
    """Reads one entry of a zip and verifies its checksum.

    Nothing is unpacked to disk and nothing is decompressed, so the content is never larger than the file.

    Args:
        path: The zip.
        name: The entry.

    Raises:
        BadInputError: The file is missing, empty, cut short, damaged, or no zip as ``write_archive`` writes them.
        KeyError: The zip has no such entry.
    """
    _check_start(path)
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            _check_entries(path, entries.values())
            return archive.read(entries[name])
    except _DAMAGE as error:
        raise damaged(path, "it is cut short, or its bytes were changed") from error
    except OSError as error:
        raise unreadable(path, error) from error


def _entry(name: str) -> zipfile.ZipInfo:
    """Returns an entry that tells neither time nor system, for the same bytes everywhere."""
    entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    entry.create_system = 3
    entry.external_attr = 0o644 << 16
    return entry


def _check_start(path: Path) -> None:
    """Tells missing, empty and foreign files by their first bytes."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except FileNotFoundError as error:
        raise BadInputError(f"There is no file {path}.") from error
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if not start:
        raise BadInputError(f"{path} is empty.")
    if start.startswith(_ZIP_START):
        return
    if _ZIP_START.startswith(start):
        raise damaged(path, "it is cut short")
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    for beginning, detail in _FOREIGN:
        if text.startswith(beginning):
            raise foreign(path, detail)
    raise foreign(path, "it is no zip archive")


def _check_entries(path: Path, entries: Iterable[zipfile.ZipInfo]) -> None:
    size = path.stat().st_size
    for entry in entries:
        parts = PurePosixPath(entry.filename).parts
        if entry.filename.startswith("/") or ".." in parts or "\\" in entry.filename:
            raise foreign(path, f"its entry {entry.filename!r} points out of it")
        if entry.is_dir():
            continue
        is_plain = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 0x1
        if not is_plain or entry.file_size != entry.compress_size:
            raise foreign(path, f"its entry {entry.filename!r} is compressed or encrypted, which no trace's is")
        if entry.file_size > size:
            raise damaged(path, f"its entry {entry.filename!r} claims to be larger than the file")


def _sync_folder(folder: Path) -> None:
    """Makes the new name last through a power cut; only POSIX lets a folder be opened for it."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
