"""Detects a file's format from its content, not its name."""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from pathlib import Path

import psutil

from memprof.errors import BadInputError
from memprof.trace.files.reading import read_bytes
from memprof.units import format_bytes

#: Profiler traces compress 10 to 30 times in gzip; a file that expands by more is not one.
_MOST_GROWTH = 40
_SLACK_BYTES = 64 << 20

#: The pickle in a page of ``_memory_viz``; its name for the list has varied by version.
_PICKLE_IN_PAGE = re.compile(rb'"base64"\s*:\s*"([A-Za-z0-9+/=\\]*)"')

_FOREIGN = "{path} is neither a memory snapshot (pickle, or a page of memory_viz) nor a profiler's trace (JSON)."
#: Bytes unpacked at a time.
_PIECE_BYTES = 4 << 20

SNAPSHOT, KINETO = "snapshot", "kineto"


def read_input(path: Path) -> tuple[str, bytes]:
    """Reads a file and detects its format.

    Args:
        path: The file: a pickle, a memory_viz page that contains one, or a profiler trace, with or without gzip.

    Returns:
        ``SNAPSHOT`` or ``KINETO``, and the bytes of the pickle or of the JSON.

    Raises:
        BadInputError: The file is missing, cannot be read, is empty, or has another format.
    """
    data = _read(path)
    _refuse_nonsense(path, data[:64])
    if data.startswith(b"\x1f\x8b"):
        data = _unzipped(path, data)
    if not data.strip():
        raise BadInputError(f"{path} is empty.")
    if data[:1] == b"\x80" or _looks_like_old_pickle(data):
        return SNAPSHOT, data
    text = data[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
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
        return read_bytes(path, _most_bytes(), lambda start: _refuse_nonsense(path, start[:64]))
    except FileNotFoundError:
        raise BadInputError(f"There is no file {path}.") from None
    except IsADirectoryError:
        raise BadInputError(f"{path} is a folder: name the snapshot or trace inside it.") from None
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def _most_bytes() -> int:
    """Returns the size limit in bytes of a file: loading it takes several times its size in memory."""
    return psutil.virtual_memory().total


def _refuse_nonsense(path: Path, start: bytes) -> None:
    """Rejects a file whose first bytes match no known format, before the rest is read or unpacked."""
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text and text[0] < 0x20 and not start.startswith(b"\x1f\x8b"):
        raise BadInputError(_FOREIGN.format(path=path))


def _unzipped(path: Path, data: bytes) -> bytes:
    limit = len(data) * _MOST_GROWTH + _SLACK_BYTES
    result = bytearray()
    try:
        while data:
            unpacker = zlib.decompressobj(wbits=31)
            piece = unpacker.decompress(data, _PIECE_BYTES)
            while piece:
                result += piece
                if len(result) > limit:
                    raise BadInputError(
                        f"{path} unpacks to more than {format_bytes(limit)}, {_MOST_GROWTH} times its size: "
                        "no trace does."
                    )
                piece = unpacker.decompress(unpacker.unconsumed_tail, _PIECE_BYTES)
            if not unpacker.eof:
                raise BadInputError(f"{path} is cut short: its gzip stream has no end.")
            data = unpacker.unused_data
            if data and not data.startswith(b"\x1f\x8b"):
                break  # padding, which gzip's own tools ignore too
    except zlib.error as error:
        raise BadInputError(f"{path} is damaged: {error}.") from error
    return bytes(result)


def _looks_like_old_pickle(data: bytes) -> bool:
    """Detects pickles of protocol 0 and 1 that request a name at once; the error names it, not a foreign format."""
    return re.match(rb"\(?[ci][\w.]+\n[\w.]+\n", data[:1000]) is not None


def _pickle_in_page(path: Path, data: bytes) -> bytes:
    found = _PICKLE_IN_PAGE.search(data)
    if found is None:
        raise BadInputError(f"{path} is a web page without a memory snapshot in it.")
    try:
        text = json.loads(b'"' + found[1] + b'"')
        # Padded with zeros to a multiple of three bytes, so that no = is needed.
        return base64.b64decode(text, validate=True).rstrip(b"\0")
    except (ValueError, binascii.Error) as error:
        raise BadInputError(f"{path} is damaged: the snapshot in its page is not base64.") from error
