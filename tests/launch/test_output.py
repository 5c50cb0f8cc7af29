"""Where a recording is written, and existing files there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memprof.launch.outcome.output import claim_output, spool_of, write_exit, write_launch
from memprof.launch.parent.settings import Settings
from memprof.launch.parent.target import CannotStartError, Target

TARGET = Target((sys.executable, "src/train.py"), "src/train.py")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def leave_spool(output: Path, parent_pid: int, started_s: float) -> Path:
    spool = spool_of(output)
    spool.mkdir()
    (spool / "launch.json").write_text(json.dumps({"parent_pid": parent_pid, "started_us": started_s * 1e6}))
    return spool


def test_default_name_tells_script_and_time() -> None:
    """``<script>.<time>.memprof`` in the current folder; two at once get two names."""
    first, second, third = (claim_output(TARGET, Settings()) for _ in range(3))
    assert re.fullmatch(r"train\.\d{8}-\d{6}\.memprof", str(first))
    assert len({first, second, third}) == 3
    assert all(spool_of(output).is_dir() for output in (first, second, third))


def test_existing_file_is_refused_and_forced(folder: Path) -> None:
    """An older recording is replaced only with -f, and not before the new one is there."""
    output = folder / "run.memprof"
    output.write_text("older")
    with pytest.raises(CannotStartError, match=r"exists already\. Replace it with -f") as error:
        claim_output(TARGET, Settings(output=output))
    assert error.value.exit_code == 125
    assert not spool_of(output).exists()
    assert claim_output(TARGET, Settings(output=output, force=True)) == output
    assert output.read_text() == "older"


def test_unfinished_recording_is_refused_and_forced(folder: Path) -> None:
    """The spool of a killed recording is data: it is named, with the way to read it, and goes only with -f."""
    output = folder / "run.memprof"
    spool = leave_spool(output, parent_pid=2**22 + 1, started_s=time.time())  # beyond the largest process id
    with pytest.raises(CannotStartError, match=f"memprof report {spool}"):
        claim_output(TARGET, Settings(output=output))
    claim_output(TARGET, Settings(output=output, force=True))
    assert list(spool.iterdir()) == []


def test_recording_under_way_is_never_taken(folder: Path) -> None:
    """Not even -f takes the spool of a recording whose parent or job still runs."""
    output = folder / "run.memprof"
    spool = leave_spool(output, os.getpid(), time.time())
    with pytest.raises(CannotStartError, match="is being recorded by another memprof"):
        claim_output(TARGET, Settings(output=output, force=True))
    (spool / "launch.json").unlink()
    (spool / f"process-{os.getpid()}").mkdir()
    with pytest.raises(CannotStartError, match="is being recorded by another memprof"):
        claim_output(TARGET, Settings(output=output, force=True))


def test_ended_process_is_not_running(folder: Path) -> None:
    """A process that has ended, even if not waited for, does not own a spool."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        while Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "Z":
            time.sleep(0.01)
        leave_spool(folder / "run.memprof", process.pid, time.time())
        claim_output(TARGET, Settings(output=folder / "run.memprof", force=True))


def test_folder_as_output_is_refused(folder: Path) -> None:
    """A folder gets the advice to name a file in it."""
    with pytest.raises(CannotStartError, match=r"-o .*run\.memprof"):
        claim_output(TARGET, Settings(output=folder, force=True))


def test_missing_folder_is_refused(folder: Path) -> None:
    """No folder is made: it is more likely misspelt."""
    with pytest.raises(CannotStartError, match="no folder absent"):
        claim_output(TARGET, Settings(output=Path("absent/run.memprof")))


def test_unwritable_folder_is_refused() -> None:
    """A folder nothing can be written to is named before the job starts."""
    with pytest.raises(CannotStartError, match="nothing can be written to /proc"):
        claim_output(TARGET, Settings(output=Path("/proc/run.memprof")))


def test_launch_and_exit_are_written(folder: Path) -> None:
    """The spool says what was started, when, by whom, and how it ended."""
    spool = spool_of(claim_output(TARGET, Settings(output=folder / "run.memprof")))
    write_launch(spool, TARGET, Settings(skip=1, steps=5, stop=True))
    write_exit(spool, -9)
    launch = json.loads((spool / "launch.json").read_text())
    assert launch["command"] == [sys.executable, "src/train.py"]
    assert launch["target"] == "src/train.py"
    assert launch["options"] == {"skip": 1, "steps": 5, "stop": True, "light": False}
    assert launch["parent_pid"] == os.getpid()
    assert abs(launch["started_us"] - time.time() * 1e6) < 60e6
    assert json.loads((spool / "exit.json").read_text())["returncode"] == -9
