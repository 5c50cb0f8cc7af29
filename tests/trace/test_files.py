"""The files that make one trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.errors import BadInputError
from memprof.trace.files.recording_files import find_files
from memprof.trace.manifest import Manifest
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
