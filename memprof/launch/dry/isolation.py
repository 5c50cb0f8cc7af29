"""Runs a job where it changes nothing: files it writes in its folder go elsewhere, and it reaches no network."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

#: The program that does it, which imports nothing of memprof.
_PROGRAM = str(Path(__file__).with_name("apart.py"))
_LIMIT_S = 20


def command_apart(scratch: Path) -> tuple[str, ...]:
    """Returns the words before a command line that run it apart.

    Args:
        scratch: A folder for what it writes, outside the current one. A folder is made in it.

    Raises:
        OSError: The folder cannot be made.
    """
    files = scratch / "apart"
    files.mkdir(mode=0o700)
    return (sys.executable, "-I", "-S", _PROGRAM, str(files))


def why_not_apart() -> str:
    """Returns why a job cannot run apart in the current folder on this machine; "" where it can. It is tried."""
    if sys.platform != "linux":
        return "only Linux can"
    try:
        with tempfile.TemporaryDirectory(prefix="memprof-apart-") as scratch:
            tried = subprocess.run(
                command_apart(Path(scratch)), capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["the system does not say why"])[-1]
