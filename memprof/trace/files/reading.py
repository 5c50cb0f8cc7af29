"""Reads files, local or at an address that fsspec opens, within a size limit, and never blocks indefinitely."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import stat
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

from memprof.errors import BadInputError, UsageError
from memprof.units import format_bytes

#: Size limit in bytes of text files that people and memprof write: plans, baselines, settings.
TEXT_LIMIT_BYTES = 16 << 20
#: The same of TOML: plans and settings. Python's parser takes seconds for more.
TOML_LIMIT_BYTES = 256 << 10
#: A key of a hundred parts and a value in a hundred containers: the parser's time grows with their square.
_LONG_KEY = re.compile(r"(?<![\w-])(?:(?:[\w-]++|\"[^\"\n]*+\"|'[^'\n]*+')[ \t]*+\.[ \t]*+){100}")
_OPENINGS = re.compile(r"(?:[\[{][^\S\n]*+){100}")
#: How long to wait for a writer to open a pipe, and for a writer that has opened it to write.
_NOBODY_S = 4.0
_SILENT_S = 30.0
_CHUNK_BYTES = 4 << 20
_KINDS = ((stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"), (stat.S_ISSOCK, "a socket"))
#: An address: a protocol of more than one letter (a single one is a Windows drive), then ``://``.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:::[^/]*)?://")
_EXTRA = "pip install 'torch-memprof[remote]'"


def refuse_special(path: Path, *, pipes: bool = False) -> None:
    """Rejects devices, pipes and sockets: reading a device may never end, and opening a pipe may block forever.

    Args:
        path: The path given. A missing file is left for the caller's open to report.
        pipes: Pipes are accepted.

    Raises:
        BadInputError: It is a device or a socket, or a pipe where pipes are not accepted.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return
    for is_kind, kind in _KINDS:
        if is_kind(mode):
            raise BadInputError(f"{path} is {kind}, not a file.")
    if stat.S_ISFIFO(mode) and not pipes:
        raise BadInputError(f"{path} is a pipe: a recording is read from a file. Write it to one first.")


def read_bytes(
    path: Path, limit_bytes: int = TEXT_LIMIT_BYTES, on_start: Callable[[bytes], None] = lambda start: None
) -> bytes:
    """Reads a file or a pipe.

    Args:
        path: The file, or a pipe with a writer.
        limit_bytes: Size limit in bytes.
        on_start: Checks the first bytes, and raises if the rest need not be read.

    Raises:
        BadInputError: It is not a regular file, exceeds the limit, or is a pipe without a writer.
        OSError: It does not exist, or cannot be read.
    """
    refuse_special(path, pipes=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        is_pipe = not stat.S_ISREG(status.st_mode)
        if not is_pipe and status.st_size > limit_bytes:
            _refuse_size(path, status.st_size, limit_bytes)
        data = bytearray()
        while chunk := _next(path, file.fileno(), has_begun=bool(data)) if is_pipe else file.read(_CHUNK_BYTES):
            if not data:
                on_start(chunk)
            data += chunk
            if len(data) > limit_bytes:
                _refuse_size(path, len(data), limit_bytes)
    return bytes(data)


def read_text(path: Path, limit_bytes: int = TEXT_LIMIT_BYTES) -> str:
    """Reads a UTF-8 file, with or without a byte order mark.

    Raises:
        BadInputError: As ``read_bytes``; or it is not UTF-8, or contains null characters.
        OSError: It does not exist, or cannot be read.
    """
    try:
        text = read_bytes(path, limit_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path} is not UTF-8 text: invalid byte {error.start}.") from None
    if "\0" in text:
        raise BadInputError(f"{path} is not text: it contains null characters.")
    return text


def parse_json(text: str | bytes, *, strict: bool = True, constants: bool = False) -> Any:
    """Parses untrusted JSON.

    Args:
        text: The JSON, as text or UTF-8 bytes.
        strict: Reject control characters in strings, NaN and infinities, and duplicate keys in an object.
        constants: Accept NaN and infinities, for a caller that reports them itself.

    Raises:
        ValueError: It is not JSON, or nests too deeply; the message says what and where.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        if not strict:
            return json.loads(text, strict=False)
        refuse = None if constants else _refuse_constant
        return json.loads(text, parse_constant=refuse, object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} in line {error.lineno}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise ValueError("it contains an integer of thousands of digits") from None
        raise


def parse_toml(text: str) -> dict[str, Any]:
    """Parses untrusted TOML.

    Raises:
        ValueError: It is not TOML, too long, nests too deeply, or has an integer beyond TOML's 64 bits; the message
            continues a sentence that begins with its name.
    """
    if len(text) > TOML_LIMIT_BYTES:
        raise ValueError(f"is longer than {format_bytes(TOML_LIMIT_BYTES)}")
    if _LONG_KEY.search(text) or _OPENINGS.search(text):
        raise ValueError("is nested too deep")
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError("is nested too deep") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"is not valid TOML: {error}") from None
    except ValueError:  # from Python's own limit
        raise ValueError("contains an integer of thousands of digits") from None
    left: list[Any] = [tables]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("contains an integer of more than 64 bits")
    return tables


def _next(path: Path, descriptor: int, *, has_begun: bool) -> bytes:
    """Waits for the next data from a pipe; empty once the writer has closed it."""
    start = time.monotonic()
    while True:
        waited = time.monotonic() - start
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:  # a writer has it open, and has written nothing
            if waited > _SILENT_S:
                raise BadInputError(f"{path} is a pipe that sent no data for {_SILENT_S:.0f} s.") from None
            select.select([descriptor], [], [], 0.5)
            continue
        if chunk or has_begun:
            return chunk
        if waited > _NOBODY_S:  # end of file, but no writer ever opened the pipe
            raise BadInputError(f"{path} is a pipe without a writer.")
        time.sleep(0.02)


def _refuse_size(path: Path, size: int, limit_bytes: int) -> NoReturn:
    raise BadInputError(
        f"{path} holds {format_bytes(size)} or more, which no such file does: at most {format_bytes(limit_bytes)}."
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is not a valid JSON number")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        last = {name: place for place, (name, _) in enumerate(pairs)}
        double = next(name for place, (name, _) in enumerate(pairs) if last[name] != place)
        raise ValueError(f"the key {double[:60]!r} is duplicated in one object")
    return record


def is_address(text: str | Path) -> bool:
    """Returns whether a text is an address, not a path."""
    return _ADDRESS.match(str(text)) is not None


def located(text: str | Path) -> Path:
    """Returns the path for a user-supplied location.

    Args:
        text: A path, or an address of a file system supported by fsspec.

    Returns:
        The path; for an address, a path-like object.

    Raises:
        UsageError: It is an address, and the package that opens it is not installed.
        BadInputError: It is an address that cannot be reached.
    """
    if isinstance(text, Path) or not is_address(text):
        return Path(text)
    path = _remote_path(text)
    # Unreachable file systems raise exceptions of their own: each builds on different libraries.
    attempt(text, path.exists)
    return path


def attempt(text: str | Path, act: Callable[[], Any]) -> Any:
    """Runs an operation on an address, whose file system may raise any exception.

    Raises:
        BadInputError: It raised anything but an OSError, or its package is missing.
    """
    try:
        return act()
    except OSError as error:
        raise BadInputError(f"{text} cannot be reached: {error.strerror or error}.") from error
    except ImportError as error:
        raise UsageError(f"{text} cannot be opened: {str(error).rstrip('.')}.") from error
    except Exception as error:
        detail = str(error).strip().splitlines() or [""]
        raise BadInputError(f"{text} cannot be reached: {type(error).__name__}: {detail[0]}".rstrip(": ")) from error


def _remote_path(text: str) -> Path:
    try:
        from upath import UPath  # from the optional extra [remote]
    except ImportError as error:
        raise UsageError(f"{text} is an address, which needs fsspec: {_EXTRA}") from error
    try:
        return cast(Path, UPath(text))
    except ImportError as error:
        raise UsageError(f"{text} cannot be opened: {str(error).rstrip('.')}.") from error
    except ValueError as error:
        raise UsageError(f"{text} is not an address supported by fsspec: {error}") from error
