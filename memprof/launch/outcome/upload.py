"""Uploads a finished recording to an fsspec address such as ``s3://bucket/run.memprof``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from memprof.errors import MemprofError
from memprof.launch.parent.target import CannotStartError
from memprof.trace.files.reading import attempt, located


def check_address(address: str, *, force: bool) -> None:
    """Checks, before the job starts, that a recording can be uploaded to an address.

    Args:
        address: The address.
        force: Whether a recording there may be overwritten.

    Raises:
        CannotStartError: The fsspec backend is not installed, the address is unreachable, or a recording exists there.
    """
    try:
        is_there = bool(attempt(address, located(address).exists))
    except MemprofError as error:
        raise CannotStartError(str(error)) from None
    if is_there and not force:
        raise CannotStartError(f"{address} exists already. Replace it with -f, or choose another name with -o.")


def upload(path: Path, address: str) -> None:
    """Uploads a recording, and deletes the local file once the upload is complete.

    Args:
        path: The recording.
        address: The destination.

    Raises:
        MemprofError: The upload failed; the local file stays, and no partial upload remains.
    """
    # An fsspec file system, and the path inside it: `Path` handles neither.
    target: Any = located(address)
    size = path.stat().st_size

    def copy() -> None:
        try:
            target.fs.put_file(str(path), target.path)
            if target.stat().st_size != size:
                raise OSError(f"only {target.stat().st_size:,} of {size:,} bytes arrived")
        except BaseException:
            with contextlib.suppress(Exception):  # a failed upload may not be removable either
                target.unlink()
            raise

    attempt(address, copy)
    path.unlink()
