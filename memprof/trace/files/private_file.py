"""Files that only their owner may read, whatever the umask: they hold what a job was given, and where it ran."""

from __future__ import annotations

import os
from io import BufferedWriter
from pathlib import Path
from typing import IO, Any, Literal, TextIO, overload

#: Permissions of such a file, and of a folder of them.
FILE_MODE, FOLDER_MODE = 0o600, 0o700

#: Bound at import: a job may replace them with its own, and count calls.
_open, _os_open = open, os.open


@overload
def open_private(path: str | os.PathLike[str], mode: Literal["xb"]) -> BufferedWriter: ...
@overload
def open_private(path: str | os.PathLike[str], mode: Literal["w", "a"] = "w", **options: str) -> TextIO: ...
def open_private(path: str | os.PathLike[str], mode: str = "w", **options: Any) -> IO[Any]:
    """Opens a file as ``open`` does; a file it creates is readable only by its owner.

    Raises:
        OSError: It cannot be opened.
    """
    return _open(path, mode, opener=_opener, **options)


def write_private(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text to a file readable only by its owner.

    Raises:
        OSError: It cannot be written.
    """
    with open_private(path, encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def make_private_folder(path: Path) -> None:
    """Creates a folder readable only by its owner, and missing parent folders; an existing one is kept.

    Raises:
        OSError: It cannot be created.
    """
    if not path.parent.exists():
        make_private_folder(path.parent)  # with parents=True, those would follow the umask
    path.mkdir(mode=FOLDER_MODE, exist_ok=True)


def _opener(path: str, flags: int) -> int:
    return _os_open(path, flags, FILE_MODE)
