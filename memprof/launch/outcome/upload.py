"""Takes a finished recording to an address that fsspec writes to, such as ``s3://bucket/run.memprof``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from memprof.errors import MemprofError
from memprof.launch.parent.target import CannotStartError
from memprof.trace.files.location import attempt, located


def check_address(address: str, *, force: bool) -> None:
    """Makes sure, before the job starts, that a recording can go to an address.

    Args:
        address: The address.
        force: Whether a recording there may be replaced.

    Raises:
        CannotStartError: What writes there is not installed, the address cannot be reached, or a recording is there.
    """
    try:
        is_there = bool(attempt(address, located(address).exists))
    except MemprofError as error:
        raise CannotStartError(str(error)) from None
    if is_there and not force:
        raise CannotStartError(f"{address} exists already. Replace it with -f, or choose another name with -o.")


def upload(path: Path, address: str) -> None:
    """Copies a recording to an address, and removes it here once it is there whole.

    Args:
        path: The recording.
        address: Where it goes.

    Raises:
        MemprofError: It cannot be written there; it stays here, and no half of it there.
    """
    # A file system of fsspec, and the path inside it: `Path` knows neither.
    target: Any = located(address)
    size = path.stat().st_size

    def copy() -> None:
        try:
            target.fs.put_file(str(path), target.path)
            if target.stat().st_size != size:
                raise OSError(f"only {target.stat().st_size:,} of {size:,} bytes arrived")
        except BaseException:
            with contextlib.suppress(Exception):  # what could not be written may not be removable either
                target.unlink()
            raise

    attempt(address, copy)
    path.unlink()
