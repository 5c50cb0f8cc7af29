"""Files that nobody but their owner may read, whatever the umask is: what a job was given, and where it ran."""

from __future__ import annotations

import os
from io import BufferedWriter
from pathlib import Path
from typing import IO, Any, Literal, TextIO, overload

#: Permissions of such a file, and of a folder of them.
FILE_MODE, FOLDER_MODE = 0o600, 0o700

#: Bound now: a job may put one of its own in the place of the builtin, and count.
_open = open


@overload
def open_private(path: str | os.PathLike[str], mode: Literal["xb"]) -> BufferedWriter: ...
@overload
def open_private(path: str | os.PathLike[str], mode: Literal["w", "a"] = "w", **options: str) -> TextIO: ...
def open_private(path: str | os.PathLike[str], mode: str = "w", **options: Any) -> IO[Any]:
    """Opens a file as ``open`` does; one that is made by it is its owner's alone.

    Raises:
        OSError: It cannot be opened.
    """
    return _open(path, mode, opener=_opener, **options)


def write_private(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text to a file that is its owner's alone.

    Raises:
        OSError: It cannot be written.
    """
    with open_private(path, encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def make_private_folder(path: Path) -> None:
    """Makes a folder that is its owner's alone, and the folders above it where they are missing; one there stays.

    Raises:
        OSError: It cannot be made.
    """
    if not path.parent.exists():
        make_private_folder(path.parent)  # with parents=True, those would be as the umask has them
    path.mkdir(mode=FOLDER_MODE, exist_ok=True)


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)
