"""Jobs that cannot start, whose files may not be large, or without a usable folder for temporary files."""

from __future__ import annotations

import os
import resource
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
from memprof.units import format_bytes

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


#: It has the system end it where a file would grow beyond the limit, and counts how often that was tried.
JOB = """
import resource, signal, sys
import torch
if sys.argv[1] == "raises":
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
tried = []
signal.signal(signal.SIGXFSZ, signal.SIG_DFL if sys.argv[1] == "default" else lambda *_: tried.append(1))
for _ in range(6):
    loss = model(torch.ones(4, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
print(tried)
if sys.argv[1] == "writes":
    with open("large", "wb") as file:
        file.write(bytes(2**17))
"""


def run(folder: Path, limit_bytes: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with words in a folder, under a limit on the size of its files."""
    limits = limit_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    (folder / "job.py").write_text(JOB)
    return subprocess.run(
        # Set by a Python of its own, as a shell would: torch's threads are no place to fork in.
        [sys.executable, "-c", SET_LIMIT, *(str(limit) for limit in limits), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


SET_LIMIT = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[2])))
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""


@pytest.mark.parametrize(("how", "kibibytes"), [("default", 40), pytest.param("writes", 100, marks=pytest.mark.slow)])
def test_what_fits_is_recorded_and_the_limit_is_named(tmp_path: Path, how: str, kibibytes: int) -> None:
    """The job ends as without memprof, and gets no signal for memprof's files; the recording opens."""
    limit = kibibytes * 1024
    plain = run(tmp_path, limit, "job.py", how)
    done = run(tmp_path, limit, "-m", "memprof", "record", "-o", "run.memprof", "job.py", how)
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout), done.stderr
    assert (plain.returncode != 0) == (how == "writes")
    said = f"the file size limit of this shell (ulimit -f, {kibibytes}.00 KiB) ended the recording; raise it"
    assert said in done.stderr
    assert done.stderr.replace("memprof: ", "").startswith(plain.stderr)
    trace = Trace.open(tmp_path / "run.memprof")
    assert said in trace.manifest.capture.reason
    assert not trace.manifest.capture.is_complete
    assert trace.steady_step().ops.op_id.size > 0


def test_what_one_file_cannot_hold_stays_in_the_spool(tmp_path: Path) -> None:
    """A job that raises its own limit is recorded whole, in files that memprof, under the lower one, cannot join.

    The message names the limit, and the spool opens.
    """
    words = "-m", "memprof", "record", "--light", "-o", "run.memprof", "job.py", "raises"
    done = run(tmp_path, 4 * 1024, *words)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr
    assert "(the file size limit of this shell, ulimit -f, is 4.00 KiB); the recording is safe in " in done.stderr
    trace = Trace.open(tmp_path / "run.memprof.spool")
    assert trace.manifest.capture.is_complete
    assert trace.steady_step().ops.op_id.size > 0


@pytest.mark.parametrize("limit", [768, 10 * 1024])
def test_where_no_step_fits_the_limit_is_named(tmp_path: Path, limit: int) -> None:
    """Nothing is recorded, and the reason given is the limit; the job trains to its end."""
    done = run(tmp_path, limit, "-m", "memprof", "record", "-o", "run.memprof", "job.py", "default")
    assert (done.returncode, done.stdout.count("\n")) == (3, 7), done.stderr
    # 512 bytes are reserved for the reason: in what is left of 768, not even the description of the process fits.
    when = "the recorder could not start in job.py:" if limit == 768 else "job.py called a model, but"
    assert done.stderr.startswith(f"memprof: nothing was recorded: {when} the file size limit of ")
    assert f"(ulimit -f, {format_bytes(limit)}) ended the recording; raise it" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]


def test_where_nothing_can_be_written_the_job_does_not_start(tmp_path: Path) -> None:
    """With a limit of zero bytes, one sentence names it."""
    done = run(tmp_path, 0, "-m", "memprof", "record", "-o", "run.memprof", "job.py", "default")
    assert (done.returncode, done.stdout) == (125, "")
    assert "the file size limit of this shell, ulimit -f, is 0 B. Raise it." in done.stderr


TEMPORARY_JOB = """
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
    (tmp_path / "job.py").write_text(TEMPORARY_JOB)
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
    (tmp_path / "job.py").write_text(TEMPORARY_JOB)
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
    (tmp_path / "job.py").write_text(TEMPORARY_JOB)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    outcome = dry_run(find_script([str(tmp_path / "job.py")]), None, DryWindow())
    assert outcome.peak_bytes is None
    assert not outcome.was_started
    assert "set TMPDIR" in outcome.reason
