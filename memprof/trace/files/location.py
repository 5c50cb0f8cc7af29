"""Location of a trace: a local path, or an address that fsspec opens, such as ``s3://bucket/run.memprof``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from memprof.errors import BadInputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

#: An address: a protocol of more than one letter (a single one is a Windows drive), then ``://``.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:::[^/]*)?://")

_EXTRA = "pip install 'torch-memprof[remote]'"


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
