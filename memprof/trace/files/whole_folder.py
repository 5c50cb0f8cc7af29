"""Writes a folder atomically."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memprof.errors import OutputError
from memprof.trace.files.private_file import FILE_MODE, FOLDER_MODE
from memprof.trace.files.whole_file import translated


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
    token = secrets.token_hex(6)
    temporary, old = (path.with_name(f".memprof-{token}.{end}") for end in ("part", "old"))
    temporary.mkdir(mode=FOLDER_MODE if is_private else 0o777)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _flush(file)
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


def _flush(file: Path) -> None:
    """Flushes a file to disk, so that a full disk is noticed before the rename."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
