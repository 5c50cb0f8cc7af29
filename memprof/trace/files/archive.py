"""The uncompressed zip that contains a trace: written atomically, and treated as untrusted when read."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from memprof.errors import BadInputError
from memprof.trace.files.reading import refuse_special
from memprof.trace.files.whole_file import whole_file

#: Exceptions raised when reading a damaged or hostile zip.
_DAMAGE = (zipfile.BadZipFile, struct.error, EOFError, NotImplementedError, RuntimeError, OverflowError, ValueError)

_ZIP_START = b"PK\x03\x04"

#: The header before each entry: its magic, and the lengths of the name and of the extra field.
_HEADER = struct.Struct("<4s22xHH")

#: The end-of-directory records of zip and zip64, up to the entry count and the directory's size in bytes.
_ZIP_END, _ZIP_END_64 = b"PK\x05\x06", b"PK\x06\x06"
_END, _END_64 = struct.Struct("<10xHI"), struct.Struct("<40xQ")
_END_REACH = 65_536 + 1_024
#: Far more than the entries of ten thousand ranks need.
_MOST_DIRECTORY_BYTES = 16 << 20

#: First bytes of files that are passed by mistake, and the message for each.
_FOREIGN = (
    (b"\x80", "it looks like a PyTorch memory snapshot: memprof import makes a recording of it"),
    (b"{", "it looks like JSON: of a profiler's trace, memprof import makes a recording"),
    (b"[", "it looks like JSON: of a profiler's trace, memprof import makes a recording"),
    (b"<", "it looks like HTML; was a web page saved in its place?"),
    (b"PAR1", "it is a single Parquet table"),
    (b"\x1f\x8b", "it is compressed with gzip: of a profiler's trace, memprof import makes a recording"),
)


def damaged(path: Path, detail: str) -> BadInputError:
    """Returns the error for a damaged trace."""
    return BadInputError(f"{path} is damaged: {detail}.")


def missing(path: Path) -> BadInputError:
    """Returns the error for a file that does not exist."""
    return BadInputError(f"no file {path}: check its name and folder.")


def foreign(path: Path, detail: str) -> BadInputError:
    """Returns the error for a file that is not a trace."""
    return BadInputError(f"{path} is not a memprof recording: {detail}.")


def unreadable(path: Path, error: Exception) -> BadInputError:
    """Returns the error for a file that the system does not permit reading."""
    return BadInputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.")


def write_archive(path: Path, entries: Iterable[tuple[str, bytes]]) -> None:
    """Writes a zip atomically.

    The same entries give the same bytes.

    Args:
        path: The file to write or replace.
        entries: Name and content of each, in order.

    Raises:
        OutputError: The disk is full or read-only, the folder is missing ...
    """
    with whole_file(path, is_private=True) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries:
            archive.writestr(_entry(name), content)


@dataclass(frozen=True)
class Archive:
    """The directory of a zip, read once: the offset of each entry, so that each can be read on its own.

    A recording of a thousand ranks has more than ten thousand entries, too many to list on every read.

    Attributes:
        path: The zip.
        entries: Its entries by name.
        size: Its size in bytes when it was listed.
    """

    path: Path
    entries: Mapping[str, zipfile.ZipInfo]
    size: int

    @staticmethod
    def open(path: Path) -> Archive:
        """Lists a zip.

        Raises:
            BadInputError: The file is missing, empty, cut short, damaged, or not a zip written by ``write_archive``.
        """
        _check_start(path)
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                _check_directory(path, file, size)
                with zipfile.ZipFile(file) as archive:
                    listed = archive.infolist()
        except _DAMAGE as error:
            raise damaged(path, "it is cut short, or its bytes were changed") from error
        except OSError as error:
            raise unreadable(path, error) from error
        _check_entries(path, listed, size)
        return Archive(path, {entry.filename: entry for entry in listed}, size)

    def read(self, name: str) -> bytes:
        """Reads one entry and verifies its checksum.

        Nothing is unpacked to disk or decompressed, so the content is never larger than the file.

        Raises:
            BadInputError: The file is gone, was replaced since, or is damaged.
            KeyError: The zip has no such entry.
        """
        (content,) = self.read_all([name])
        return content

    def read_all(self, names: Sequence[str]) -> list[bytes]:
        """Reads several entries with the file opened once; raises as ``read``."""
        entries = [self.entries[name] for name in names]
        try:
            with self.path.open("rb") as file:
                return [self._read(file, entry) for entry in entries]
        except FileNotFoundError as error:
            raise missing(self.path) from error
        except _DAMAGE as error:
            raise damaged(self.path, "it is cut short, or its bytes were changed") from error
        except OSError as error:
            raise unreadable(self.path, error) from error

    def _read(self, file: IO[bytes], entry: zipfile.ZipInfo) -> bytes:
        file.seek(entry.header_offset)
        header = file.read(_HEADER.size)
        magic, name_length, extra_length = _HEADER.unpack(header)
        if magic != _ZIP_START:
            raise zipfile.BadZipFile("no entry begins there")
        name = file.read(name_length)
        file.seek(extra_length, os.SEEK_CUR)
        content = file.read(entry.file_size)
        is_whole = len(content) == entry.file_size and zlib.crc32(content) == entry.CRC
        if not is_whole or name != entry.orig_filename.encode("utf-8"):
            raise zipfile.BadZipFile("its checksum does not match")
        return content


def _entry(name: str) -> zipfile.ZipInfo:
    """Returns zip metadata without time or system, for identical bytes everywhere."""
    entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    entry.create_system = 3
    entry.external_attr = 0o644 << 16
    return entry


def _check_start(path: Path) -> None:
    """Detects missing, empty and foreign files by their first bytes."""
    refuse_special(path)
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except FileNotFoundError as error:
        raise missing(path) from error
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
    raise foreign(path, "it is not a zip archive")


def _check_directory(path: Path, file: IO[bytes], size: int) -> None:
    """Rejects an oversized directory: each entry takes twenty times its bytes in memory."""
    file.seek(max(size - _END_REACH, 0))
    end = file.read(_END_REACH)
    place = end.rfind(_ZIP_END)
    if place >= 0 and place + _END.size <= len(end):
        entries, length = _END.unpack_from(end, place)
        is_64 = length == 0xFFFFFFFF or entries == 0xFFFF
        # The zip64 record precedes it, and holds the length there.
        before = end.rfind(_ZIP_END_64, 0, place) if is_64 else -1
        if before >= 0 and before + _END_64.size <= len(end):
            (length,) = _END_64.unpack_from(end, before)
        if length > _MOST_DIRECTORY_BYTES:
            raise foreign(path, f"its list of entries takes {length:,} bytes, which no trace's does")
    file.seek(0)


def _check_entries(path: Path, entries: Sequence[zipfile.ZipInfo], size: int) -> None:
    names = {entry.filename for entry in entries}
    if len(names) < len(entries):
        raise foreign(path, "several of its entries have the same name")
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        if entry.header_offset < end:
            raise foreign(path, f"its entry {entry.filename!r} overlaps another")
        end = entry.header_offset + _HEADER.size + entry.compress_size
    for entry in entries:
        parts = PurePosixPath(entry.filename).parts
        if entry.filename.startswith("/") or ".." in parts or "\\" in entry.filename:
            raise foreign(path, f"its entry {entry.filename!r} points outside the file")
        if entry.is_dir():
            continue
        is_plain = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 0x1
        if not is_plain or entry.file_size != entry.compress_size:
            raise foreign(path, f"its entry {entry.filename!r} is compressed or encrypted, which no trace's is")
        if entry.file_size > size:
            raise damaged(path, f"its entry {entry.filename!r} claims to be larger than the file")
