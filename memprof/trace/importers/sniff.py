"""Detects a file's format from its content, not its name."""

from __future__ import annotations

import base64
import binascii
import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from memprof.errors import BadInputError
from memprof.machines.host_limits import free_memory
from memprof.trace.files.reading import read_bytes
from memprof.trace.importers.pickles.safe_pickle import looks_old
from memprof.units import format_bytes

#: Profiler traces compress 10 to 30 times in gzip; a file that expands by more is not one. xz reaches 60 on them.
_MOST_GROWTH = {"gzip": 40, "xz": 100, "bzip2": 100}
_SLACK_BYTES = 64 << 20

#: The pickle in a page of ``_memory_viz``; its name for the list has varied by version.
_PICKLE_IN_PAGE = re.compile(rb'"base64"\s*:\s*"([A-Za-z0-9+/=\\]*)"')

#: A page of ``torch.profiler``'s ``export_memory_timeline``: a picture without figures.
_PICTURE_IN_PAGE = re.compile(rb"<img [^>]*src=[\"']?data:image/png;base64")

_FOREIGN = (
    "{path} is neither a memory snapshot (pickle, or a page of memory_viz), nor a profiler's trace or memory timeline "
    "(JSON)."
)
#: How compressed files start, and the format's name.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\0": "xz", b"BZh": "bzip2"}
#: Bytes unpacked at a time.
_PIECE_BYTES = 4 << 20

SNAPSHOT, KINETO, TIMELINE = "snapshot", "kineto", "timeline"
#: A memory timeline is a list of numbers and lists of numbers; a trace that is a list holds dicts.
_TIMELINE_START = re.compile(rb"\[\s*\[\s*(?:-?\d|\])")


def read_input(path: Path) -> tuple[str, bytes]:
    """Reads a file and detects its format.

    Args:
        path: The file: a pickle, a memory_viz page that contains one, or a profiler's trace or memory timeline, as it
            is or compressed with gzip, xz or bzip2.

    Returns:
        ``SNAPSHOT``, ``KINETO`` or ``TIMELINE``, and the bytes of the pickle or of the JSON.

    Raises:
        BadInputError: The file is missing, cannot be read, is empty, or has another format.
    """
    data = _read(path)
    _refuse_nonsense(path, data[:64])
    compression = _compression(data)
    if compression:
        data = _unpacked(path, data, compression)
    if not data.strip():
        raise BadInputError(f"{path} is empty.")
    if data[:1] == b"\x80" or looks_old(data):
        return SNAPSHOT, data
    text = data[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
    if _TIMELINE_START.match(text):
        return TIMELINE, data
    if text[:1] in (b"{", b"["):
        return KINETO, data
    if text[:1] == b"<":
        return SNAPSHOT, _pickle_in_page(path, data)
    if text.startswith(b"PK\x03\x04"):
        if b"manifest.json" in data[:4096]:
            raise BadInputError(f"{path} is already a memprof recording: memprof report {path}")
        raise BadInputError(f"{path} is a zip archive, such as torch.save writes: it holds no memory snapshot.")
    raise BadInputError(_FOREIGN.format(path=path))


def _read(path: Path) -> bytes:
    try:
        # Loading a file takes several times its size in memory.
        return read_bytes(path, free_memory().total_bytes, lambda start: _refuse_nonsense(path, start[:64]))
    except FileNotFoundError:
        raise BadInputError(f"no file {path}: check its name and folder.") from None
    except IsADirectoryError:
        raise BadInputError(f"{path} is a folder: name the snapshot or trace inside it.") from None
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def _refuse_nonsense(path: Path, start: bytes) -> None:
    """Rejects a file whose first bytes match no known format, before the rest is read or unpacked."""
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text and text[0] < 0x20 and not _compression(start):
        raise BadInputError(_FOREIGN.format(path=path))


def _compression(start: bytes) -> str:
    return next((name for magic, name in _COMPRESSED.items() if start.startswith(magic)), "")


#: The standard library's readers, which join the streams of a file and skip padding behind them.
_OPENERS: dict[str, Callable[[BinaryIO], BinaryIO]] = {"gzip": gzip.open, "xz": lzma.open, "bzip2": bz2.open}  # type: ignore[dict-item]


def _unpacked(path: Path, data: bytes, kind: str) -> bytes:
    limit = len(data) * _MOST_GROWTH[kind] + _SLACK_BYTES
    result = bytearray()
    try:
        with _OPENERS[kind](io.BytesIO(data)) as file:
            while piece := file.read(_PIECE_BYTES):
                result += piece
                if len(result) > limit:
                    raise BadInputError(
                        f"{path} unpacks to more than {format_bytes(limit)}, {_MOST_GROWTH[kind]} times its size: "
                        "no trace does."
                    )
    except EOFError:
        raise BadInputError(f"{path} is cut short: its {kind} stream has no end.") from None
    except (zlib.error, lzma.LZMAError, OSError) as error:
        raise BadInputError(f"{path} is damaged: {error}.") from error
    return bytes(result)


def _pickle_in_page(path: Path, data: bytes) -> bytes:
    found = _PICKLE_IN_PAGE.search(data)
    if found is None and _PICTURE_IN_PAGE.search(data):
        raise BadInputError(
            f"{path} is a memory timeline as a picture, without figures: export it with a name that ends in .json or "
            ".raw.json.gz (torch.profiler, export_memory_timeline)."
        )
    if found is None:
        raise BadInputError(f"{path} is a web page without a memory snapshot in it.")
    try:
        text = json.loads(b'"' + found[1] + b'"')
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise BadInputError(f"{path} is damaged: the snapshot in its page is not base64.") from error
