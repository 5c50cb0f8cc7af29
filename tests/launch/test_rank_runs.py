"""Ranks that are stopped, released and left out while others of a dry run go on; these need no torch."""

from __future__ import annotations

import os
import sys
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
