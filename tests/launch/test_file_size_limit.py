"""Jobs whose files may not be larger than a few KiB (``ulimit -f``)."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.trace.store import Trace
from memprof.units import format_bytes

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
