"""Errors that prevent a recording end with status 125 and a message; the job has not run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_MEMPROF = (sys.executable, "-P", "-m", "memprof.cli.main", "record")


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((*_MEMPROF, *words), cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_name_that_is_too_long(tmp_path: Path) -> None:
    """A name for -o that no file system takes."""
    (tmp_path / "train.py").write_text("print('ran')")
    done = _run(tmp_path, "-o", "a" * 300 + ".memprof", "train.py")
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr.endswith("cannot be used: File name too long.\n")


def test_folder_that_was_deleted(tmp_path: Path) -> None:
    """The current folder was removed under the shell."""
    (tmp_path / "train.py").write_text("print('ran')")
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"cd {gone} && rmdir {gone} && exec {' '.join(_MEMPROF)} {tmp_path / 'train.py'}"
    done = subprocess.run(("sh", "-c", script), capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (125, "")
    assert "the current folder no longer exists" in done.stderr
