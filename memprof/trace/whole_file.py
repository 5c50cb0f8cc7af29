"""A file that is written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Writes a file under a temporary name beside ``path`` and renames it, so that no half file is ever there.

    Args:
        path: The file to write or replace.

    Raises:
        OSError: The disk is full or read-only, the folder is missing ...
    """
    temporary = path.with_name(f".memprof-{secrets.token_hex(6)}.part")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
