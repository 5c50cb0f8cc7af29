"""Ranks that are stopped, released and left out while others of a dry run go on; these need no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from memprof.launch.dry import rank_runs
from memprof.launch.dry.rank_processes import FORKS_RANKS
from memprof.launch.dry.rank_runs import RankRuns
from memprof.launch.parent.relay import SignalRelay
from memprof.trace.files.rank_roles import FOLDER, read_same

#: Rank 0 waits for rank 1 to send a message.
JOB = """
import os, sys, time
from pathlib import Path
from memprof.trace.files.rank_roles import FOLDER, WAITING, RankRole
spool, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def wait_for(name):
    limit = time.monotonic() + 30
    while not (spool / name).exists():
        assert time.monotonic() < limit
        time.sleep(0.02)
if rank == 0:
    waiting = spool / FOLDER / f"{WAITING}0"
    waiting.write_text("1")
    wait_for("sent")
    waiting.unlink()
"""
END = """
RankRole(rank, ranks, [], [], 7).write(spool)
"""
SENDS_AND_STAYS = """
if rank == 1:
    (spool / f"process-{os.getpid()}").mkdir()
    (spool / "sent").write_text(str(os.getpid()))
    time.sleep(100)
"""
HOLDS_A_LOCK_UNTIL_IT_WAS_STOPPED = """
if rank == 0:
    wait_for("free")
else:
    (spool / "sent").touch()
    seen = time.monotonic()
    while time.monotonic() - seen < 0.3:
        seen = time.monotonic()
        time.sleep(0.02)
    (spool / "free").touch()
"""


def _run(spool: Path, job: str, ranks: int) -> int:
    environment = {**os.environ, FORKS_RANKS: "0"}
    with SignalRelay() as relay:
        runs = RankRuns((sys.executable, "-c", JOB + job + END, str(spool)), environment, spool, ranks, 1, "job")
        return runs.run(relay, None, None)


def test_a_rank_that_was_only_needed_for_its_messages_is_ended_and_left_out(tmp_path: Path) -> None:
    """Rank 1 of 4 sends to rank 0, and does what ranks 0 and 3 do: the run does not wait for its end."""
    assert _run(tmp_path, SENDS_AND_STAYS, 4) == 0
    assert read_same(tmp_path) == {"0": [0, 1, 2], "3": [3]}
    assert sorted(path.name for path in (tmp_path / FOLDER).glob("ended-*")) == ["ended-0", "ended-3"]
    assert not list(tmp_path.glob("process-*"))
    assert not psutil.pid_exists(int((tmp_path / "sent").read_text()))


def test_a_stopped_rank_is_released_when_the_running_one_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one processor rank 1 is stopped while rank 0 runs, which waits for a file that rank 1 would write."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(rank_runs, "_IDLE_S", 0.5)
    assert _run(tmp_path, HOLDS_A_LOCK_UNTIL_IT_WAS_STOPPED, 2) == 0
    assert (tmp_path / "free").exists()


RUNS_ALONE_UNTIL_THE_SHELL_HAS_ENDED = """
if rank == 0:
    import psutil
    limit = time.monotonic() + 30
    while psutil.Process(int((spool / "sent").read_text())).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < limit
        time.sleep(0.02)
    (spool / "stopped").touch()
    wait_for("shell-ended")
else:
    (spool / "sent").write_text(str(os.getpid()))
    time.sleep(0.3)
"""
#: Runs a job with two ranks on one processor.
_RUNNER = """
import os, sys
from pathlib import Path
from memprof.launch.dry.rank_runs import RankRuns
from memprof.launch.parent.job_process import GroupAnchor
from memprof.launch.parent.relay import SignalRelay
os.sched_getaffinity = lambda _: {0}
spool = Path(sys.argv[1])
with SignalRelay() as relay, GroupAnchor():
    command = (sys.executable, "-c", sys.argv[2], str(spool))
    status = RankRuns(command, dict(os.environ), spool, 2, 1, "job").run(relay, None, None)
(spool / "status").write_text(str(status))
"""
#: A shell with job control: it starts the job in the background, and exits while a rank is stopped.
_SHELL = """
import subprocess, sys, time
from pathlib import Path
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], process_group=0)
while not (Path(sys.argv[2]) / "stopped").exists():
    time.sleep(0.02)
"""


def test_a_job_in_the_background_outlives_its_shell(tmp_path: Path) -> None:
    """A group of processes that loses its shell while one of them is stopped would be hung up, and end."""
    job = JOB + RUNS_ALONE_UNTIL_THE_SHELL_HAS_ENDED + END
    command = [sys.executable, "-c", _SHELL, _RUNNER, str(tmp_path), job]
    environment = {**os.environ, FORKS_RANKS: "0"}
    subprocess.run(command, env=environment, start_new_session=True, timeout=60, check=True)
    (tmp_path / "shell-ended").touch()
    limit = time.monotonic() + 30
    while not (tmp_path / "status").exists():
        assert time.monotonic() < limit
        time.sleep(0.05)
    assert (tmp_path / "status").read_text() == "0"
