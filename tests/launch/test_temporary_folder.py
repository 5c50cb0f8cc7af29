"""Jobs where the folder for temporary files is read-only, full or missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from memprof.launch.dry.job_server import dry_run
from memprof.launch.parent.settings import DryWindow
from memprof.launch.parent.target import find_script
from memprof.trace.store import Trace

JOB = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("trained")
"""

#: Mounts a folder of 64 KiB for the processes of one command alone, fills it, and runs the command.
FULL = 'mount -t tmpfs -o size=64k none "$0" && { cat /dev/zero > "$0/all" 2> /dev/null; exec "$@"; }'


def in_namespace() -> bool:
    """Whether this process may mount something that no other sees."""
    if os.name != "posix" or shutil.which("unshare") is None:
        return False
    tried = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


def test_a_job_without_proc_is_recorded(tmp_path: Path) -> None:
    """In a chroot or a hardened container, too: without torch's profiler, which would print to the job's stderr.

    4 x 4 weights and 4 biases, with gradients of the same size, are 160 bytes; the report says what it lacks.
    """
    if not in_namespace():
        pytest.skip("hiding /proc needs rights of the superuser")
    (tmp_path / "job.py").write_text(JOB)
    record = f"{sys.executable} -m memprof record -o run.memprof job.py"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none /proc; {record}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "process name" not in done.stderr
    trace = Trace.open(tmp_path / "run.memprof")
    assert "torch's profiler was off (no /proc) in the timed step" in "; ".join(trace.manifest.notes)
    assert trace.step_peaks()[4] >= 160


@pytest.mark.parametrize("kind", ["read-only", "missing", "full"])
def test_a_job_is_recorded_as_ever(tmp_path: Path, kind: str) -> None:
    """Status and output are the job's own, and the recording, a light one that is cut while it is packed, is whole."""
    place = tmp_path / "temporary"
    (tmp_path / "job.py").write_text(JOB)
    before: list[str] = []
    if kind != "missing":
        place.mkdir(mode=0o555)
    if kind == "full":
        if not in_namespace():
            pytest.skip("mounting a full folder needs rights of the superuser")
        before = ["unshare", "--mount", "sh", "-c", FULL, str(place)]
    done = subprocess.run(
        [*before, sys.executable, "-m", "memprof", "record", "--light", "-o", "run.memprof", "job.py"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(place), "TEMP": str(place), "TMP": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert Trace.open(tmp_path / "run.memprof").manifest.capture.is_complete


def test_without_any_temporary_folder_a_dry_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names what cannot be written, and what to set; the job is not started."""
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    outcome = dry_run(find_script([str(tmp_path / "job.py")]), None, DryWindow())
    assert outcome.peak_bytes is None
    assert not outcome.was_started
    assert "set TMPDIR" in outcome.reason
