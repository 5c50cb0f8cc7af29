"""macOS and Windows: what reads recordings runs without Linux's modules, and recording is refused in one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memprof.launch.parent.target import ANY_SYSTEM, CannotStartError, Target

ROOT = Path(__file__).parent.parent
RUN = ROOT / "sample_traces" / "gpt" / "run.memprof"

# Others' packages are imported before: those for this system need its modules.
_READ = """
import os, signal, sys
import numpy, pandas, psutil, pyarrow.parquet, rich.console, scipy.optimize, scipy.sparse, subprocess, tempfile
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None  # an import of it fails, as where it does not exist
for name in ("fork", "geteuid", "getuid", "killpg", "register_at_fork", "sched_getaffinity", "setsid"):
    delattr(os, name)
for name in ("SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGXFSZ"):
    delattr(signal, name)
from memprof.cli.main import main
run = sys.argv[1]
for words in (
    ["report", run],
    ["report", run, "--html", "report.html"],
    ["suggest", run, "--budget", "60%", "--time-limit", "2", "--write", "plan.toml"],
    ["predict", run, "--plan", "plan.toml"],
    ["diff", run, run],
    ["export", run, "--to", "summary", "-o", "summary.json"],
    ["export", run, "--to", "snapshot", "-o", "snapshot.pickle"],
    ["import", "snapshot.pickle", "-o", "imported.memprof"],
):
    status = main(words)
    assert status == 0, (words, status)
"""


def test_recordings_are_read_without_linux(tmp_path: Path) -> None:
    """Reports, plans, comparisons, exports and imports need none of the modules and functions that Windows lacks."""
    done = subprocess.run([sys.executable, "-c", _READ, str(RUN)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "88.92 MiB" in done.stdout


@pytest.mark.parametrize(("platform", "name"), [("darwin", "macOS"), ("win32", "Windows")])
def test_recording_is_refused_elsewhere(monkeypatch: pytest.MonkeyPatch, platform: str, name: str) -> None:
    """A job is not started, and the sentence says what does work; a variable allows it."""
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(CannotStartError, match=rf"^recording needs Linux; on {name}, memprof reads") as caught:
        Target(("python", "train.py"), "train.py")
    assert caught.value.exit_code == 125
    monkeypatch.setenv(ANY_SYSTEM, "1")
    assert Target(("python", "train.py"), "train.py").name == "train.py"
