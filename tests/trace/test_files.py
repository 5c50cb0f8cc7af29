"""Where recordings are: the files of one trace, addresses, and those that are still being written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memprof.errors import BadInputError, UsageError
from memprof.trace.files.reading import is_address, located
from memprof.trace.files.recording_files import find_files
from memprof.trace.manifest import Manifest
from memprof.trace.running import is_being_written, process_space
from memprof.trace.schema import Ranks
from memprof.trace.store import Trace, write_trace
from tests.building import Tables


@pytest.fixture
def parts(tmp_path: Path, small_tables: Tables) -> Path:
    """Two nodes of two ranks each, next to files with other names."""
    for node in range(2):
        ranks = [(Manifest(rank=2 * node + local, world_size=4), small_tables) for local in range(2)]
        write_trace(tmp_path / f"run.node{node}.memprof", ranks)
    for other in ("run2.node0.memprof", "run.nodes.memprof", "run.node1.old.memprof"):
        write_trace(tmp_path / other, [(Manifest(), small_tables)])
    return tmp_path


def test_the_name_that_parts_share_opens_them(parts: Path) -> None:
    """`run.memprof` matches run.node0.memprof and run.node1.memprof, and no other file."""
    assert find_files(parts / "run.memprof") == [parts / "run.node0.memprof", parts / "run.node1.memprof"]
    assert Trace.open(parts / "run.memprof").ranks == (0, 1, 2, 3)


def test_a_file_of_that_name_goes_first(parts: Path, small_tables: Tables) -> None:
    """Where there is a run.memprof it is what is opened."""
    write_trace(parts / "run.memprof", [(Manifest(rank=7), small_tables)])
    assert Trace.open(parts / "run.memprof").ranks == (7,)


def test_one_part_opens_alone(parts: Path) -> None:
    """A part is a recording like any other."""
    assert Trace.open(parts / "run.node1.memprof").ranks == (2, 3)


def test_a_damaged_part_is_named(parts: Path) -> None:
    """A part that cannot be read is an error, not a node left out in silence."""
    (parts / "run.node1.memprof").write_bytes(b"PK\x03\x04")
    with pytest.raises(BadInputError, match=r"run\.node1\.memprof is damaged"):
        Trace.open(parts / "run.memprof")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("s3://bucket/run.memprof", True),
        ("simplecache::s3://bucket/run.memprof", True),
        ("memory://run.memprof", True),
        ("run.memprof", False),
        ("C://run.memprof", False),
        ("/a/b://c", False),
    ],
)
def test_addresses_are_told_from_paths(text: str, is_one: bool) -> None:
    """A protocol makes an address; a drive of Windows does not."""
    assert is_address(text) is is_one


def test_paths_stay_paths(tmp_path: Path) -> None:
    """Paths that are not addresses are opened as usual."""
    assert located(str(tmp_path)) == tmp_path


def test_a_recording_at_an_address_opens_like_a_file(small_file: Path) -> None:
    """Steps, tables and summaries are read from where the file lies."""
    upath = pytest.importorskip("upath")
    address = "memory://memprof-tests/run.memprof"
    upath.UPath(address).write_bytes(small_file.read_bytes())
    trace = Trace.open(address)
    assert trace.recorded_steps == Trace.open(small_file).recorded_steps
    trace.steady_step().check()
    assert len(trace.summary(Ranks)) == 1


def test_a_folder_at_an_address_opens_as_one(tmp_path: Path, small_tables: Tables) -> None:
    """The parts of a job that lie below one address open together, by the folder and by their common name."""
    upath = pytest.importorskip("upath")
    for rank in range(2):
        write_trace(tmp_path / "part", [(Manifest(rank=rank, world_size=2), small_tables)])
        upath.UPath(f"memory://memprof-tests-job/run.rank{rank}.memprof").write_bytes((tmp_path / "part").read_bytes())
    assert Trace.open("memory://memprof-tests-job").ranks == (0, 1)
    assert Trace.open("memory://memprof-tests-job/run.memprof").ranks == (0, 1)


def test_addresses_that_cannot_be_opened_are_told() -> None:
    """An unknown protocol, one whose package is missing and a missing file are each refused with one message."""
    pytest.importorskip("upath")
    with pytest.raises(UsageError, match="is not an address supported by fsspec"):
        Trace.open("nosuch://bucket/run.memprof")
    with pytest.raises(BadInputError, match=r"no file memory://.*missing\.memprof"):
        Trace.open("memory://memprof-tests/missing.memprof")


def test_what_is_missing_to_open_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the sentence says what to install."""
    monkeypatch.setitem(__import__("sys").modules, "upath", None)
    with pytest.raises(UsageError, match=r"needs fsspec: pip install 'torch-memprof\[remote\]'"):
        Trace.open("s3://bucket/run.memprof")


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
