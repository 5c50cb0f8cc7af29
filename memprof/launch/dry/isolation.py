"""Runs a job without side effects: writes in its folder are redirected, and it reaches no network."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

#: The isolating script, which imports nothing of memprof.
_PROGRAM = str(Path(__file__).with_name("apart.py"))
_LIMIT_S = 20


def command_apart(scratch: Path) -> tuple[str, ...]:
    """Returns the command prefix that isolates a command.

    Args:
        scratch: A folder for redirected writes, outside the current one. A subfolder is created in it.

    Raises:
        OSError: The subfolder cannot be created.
    """
    files = scratch / "apart"
    files.mkdir(mode=0o700)
    return (sys.executable, "-I", "-S", _PROGRAM, str(files))


def why_not_apart() -> str:
    """Returns why isolation fails in the current folder on this machine; "" if a trial succeeds."""
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
