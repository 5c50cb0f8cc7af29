"""Whether a recording is still being written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memprof.trace.running import is_being_written, process_space


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """A spool without any file."""
    folder = tmp_path / "run.memprof.spool"
    folder.mkdir()
    return folder


def write_launch(spool: Path, **record: object) -> None:
    launch = {"parent_pid": os.getpid(), "started_us": time.time() * 1e6, "process_space": process_space()}
    (spool / "launch.json").write_text(json.dumps({**launch, **record}))


def test_a_running_parent_or_process_of_the_job_writes_it(spool: Path) -> None:
    """Until both have ended; a process that began after the recording is another one of the same number."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        write_launch(spool, parent_pid=child.pid)
        assert is_being_written(spool)
        child.kill()
        child.wait()
    assert not is_being_written(spool)
    (spool / f"process-{os.getpid()}").mkdir()
    assert is_being_written(spool)
    os.utime(spool / f"process-{os.getpid()}", (1, 1))
    assert not is_being_written(spool)


@pytest.mark.parametrize("text", ["", "[]", '{"parent_pid": "x", "started_us": 1}', '{"parent_pid": 1}'])
def test_a_damaged_launch_record_leaves_the_folders_of_processes(spool: Path, text: str) -> None:
    """Their names are process ids."""
    (spool / "launch.json").write_text(text)
    (spool / "process-of-nobody").mkdir()
    assert not is_being_written(spool)
    (spool / f"process-{os.getpid()}").mkdir()
    assert is_being_written(spool)


def test_on_another_machine_what_was_just_written_counts(spool: Path) -> None:
    """A process id of another machine, or of another container, is no process here."""
    write_launch(spool, process_space="another machine")
    assert is_being_written(spool)
    for path in (spool / "launch.json", spool):
        os.utime(path, (time.time() - 3600,) * 2)
    assert not is_being_written(spool)
    (spool / "process-1").mkdir()
    assert is_being_written(spool)


def test_without_proc_what_was_just_written_counts(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is seen there, and the recording of another memprof must not be replaced."""
    monkeypatch.setattr("memprof.trace.running.process_space", lambda: "")
    write_launch(spool)
    assert is_being_written(spool)
    for path in (spool / "launch.json", spool):
        os.utime(path, (time.time() - 3600,) * 2)
    assert not is_being_written(spool)


def test_process_space_is_that_of_all_processes_here() -> None:
    """And known on Linux."""
    code = "from memprof.trace.running import process_space; print(process_space())"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert seen == process_space() != ""
