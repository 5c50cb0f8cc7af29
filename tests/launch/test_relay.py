"""Signals around a recorded job, as schedulers, shells and supervisors send them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from memprof.errors import InconclusiveError

pytestmark = pytest.mark.cold

COUNTING = """
import os, signal, sys, time
got = os.open("got", os.O_CREAT | os.O_WRONLY)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: os.write(got, b"%d\\n" % number))
open("ready", "w").write(str(os.getpid()))
while not os.path.exists("enough"):
    time.sleep(0.02)
"""
DEFAULT = """
import os, time
open("ready", "w").write(str(os.getpid()))
time.sleep(30)
"""


class Running:
    """A recorded job under way."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.seen = 0
        while not (folder / "ready").exists() or not (folder / "ready").read_text():
            assert process.poll() is None
            time.sleep(0.01)
        self.job_pid = int((folder / "ready").read_text())

    def got(self, count: int) -> list[int]:
        """Returns the signals that the job got since this was last asked: so many, and what comes a second time."""
        until = time.monotonic() + 10
        while len(found := (self.folder / "got").read_text().split()) < self.seen + count and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.4)
        found = (self.folder / "got").read_text().split()[self.seen :]
        self.seen += len(found)
        return [int(word) for word in found]

    def finish(self) -> None:
        """Lets the job end."""
        (self.folder / "enough").touch()
        self.process.communicate(timeout=30)


@contextmanager
def running(folder: Path, program: str, *wrapper: str) -> Iterator[Running]:
    (folder / "job.py").write_text(program)
    process = subprocess.Popen(
        [*wrapper, sys.executable, "-P", "-m", "memprof.cli.main", "record", "job.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Not a session of its own: the system never stops a group that no shell could continue.
        process_group=0,
    )
    try:
        yield Running(process, folder)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


#: Status of a recording of a job that ends well and never trains.
NOT_RECORDED = InconclusiveError.exit_code
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def test_each_signal_reaches_the_job_once_whoever_sends_it(tmp_path: Path) -> None:
    """To memprof alone, as by a supervisor; to the group, as by Ctrl-C; again; and to both at once, as by `timeout`."""
    with running(tmp_path, COUNTING) as job:
        for send in (job.process.send_signal, lambda number: os.killpg(job.process.pid, number)) * 2:
            for number in SIGNALS:
                send(number)
            assert sorted(job.got(len(SIGNALS))) == sorted(SIGNALS)
        job.process.send_signal(signal.SIGTERM)
        os.killpg(job.process.pid, signal.SIGTERM)
        assert job.got(1) == [signal.SIGTERM]
        # Ctrl-Z stops memprof and the job together, and both go on together.
        os.killpg(job.process.pid, signal.SIGTSTP)
        time.sleep(0.3)
        statuses = {psutil.Process(pid).status() for pid in (job.process.pid, job.job_pid)}
        os.killpg(job.process.pid, signal.SIGCONT)
        assert statuses == {psutil.STATUS_STOPPED}
        job.finish()
        assert job.got(0) == []
        assert job.process.returncode == NOT_RECORDED


@pytest.mark.parametrize("number", SIGNALS)
def test_job_killed_by_a_signal_is_memprof_killed_by_it(tmp_path: Path, number: signal.Signals) -> None:
    """A signal to memprof that kills the job ends memprof by the same signal."""
    with running(tmp_path, DEFAULT) as job:
        job.process.send_signal(number)
        _, stderr = job.process.communicate(timeout=30)
        assert job.process.returncode == -number
        assert "never imported torch" in stderr
    assert not list(tmp_path.glob("*.memprof*"))


def test_ignored_signals_stay_ignored(tmp_path: Path) -> None:
    """Under nohup a hang-up reaches neither memprof nor the job."""
    with running(tmp_path, "import signal\nprint(int(signal.getsignal(1)))\n" + DEFAULT, "nohup") as job:
        job.process.send_signal(signal.SIGHUP)
        os.killpg(job.process.pid, signal.SIGHUP)
        time.sleep(0.5)
        assert job.process.poll() is None
        os.kill(job.job_pid, signal.SIGKILL)
        stdout, _ = job.process.communicate(timeout=30)
        assert stdout.endswith("1\n")
        assert job.process.returncode == -signal.SIGKILL


def test_job_outlives_a_killed_memprof(tmp_path: Path) -> None:
    """SIGKILL to memprof leaves the job running, and none of memprof's processes."""
    with running(tmp_path, COUNTING) as job:
        helpers = [child for child in psutil.Process(job.process.pid).children() if child.pid != job.job_pid]
        job.process.kill()
        job.process.wait()
        _, alive = psutil.wait_procs(helpers, timeout=60)
        assert not alive
        os.kill(job.job_pid, signal.SIGTERM)
        assert job.got(1) == [signal.SIGTERM]
        job.finish()
    assert [path.name.endswith(".memprof.spool") for path in tmp_path.glob("*.memprof*")] == [True]


def test_nobody_else_keeps_the_output_open(tmp_path: Path) -> None:
    """A reader of the job's output sees its end as soon as the job and memprof have ended."""
    (tmp_path / "job.py").write_text("import os; os.write(1, b'x'); os.close(1); os.close(2)")
    command = [sys.executable, "-P", "-m", "memprof.cli.main", "record", "job.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=30)
    assert ended.returncode == NOT_RECORDED
    assert ended.stdout == b"x"
