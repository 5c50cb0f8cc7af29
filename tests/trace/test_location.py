"""Recordings at addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.errors import BadInputError, UsageError
from memprof.trace.files.reading import is_address, located
from memprof.trace.manifest import Manifest
from memprof.trace.schema import Ranks
from memprof.trace.store import Trace, write_trace
from tests.building import Tables


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
