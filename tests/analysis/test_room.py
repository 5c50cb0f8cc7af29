"""Out of memory in snapshots: the parts add up to what torch could use, and what would have made it fit is replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memprof.analysis.allocator.imported_parts import imported_block_sizes
from memprof.analysis.out_of_memory.post_mortem import PostMortem, examine
from memprof.cli.main import main
from memprof.trace.importers.importing import import_file
from memprof.trace.store import Trace, write_trace
from tests.trace.importers.writing import FORWARD, MIB, block, entry, freed, segment, snapshot, write


def failed(size: int, free: int) -> dict[str, Any]:
    """The entry of a failed request."""
    return {"action": "oom", "device_free": free, "size": size, "stream": 0, "frames": list(FORWARD), "time_us": 900}


def rising(count: int, *, keeps: bool) -> tuple[list[Any], list[Any]]:
    """Requests of rising sizes, each freed again; where asked, 12 MiB stay at the front of each segment."""
    history, segments = [], []
    for number in range(count):
        address, size = number << 30, (100 + 20 * number) * MIB
        history += [entry("segment_alloc", address, size, FORWARD), entry("alloc", address, size, FORWARD)]
        history += freed(address, size)
        blocks = [block(size, "inactive")]
        if keeps:
            history.append(entry("alloc", address, 12 * MIB, FORWARD))
            blocks = [block(12 * MIB, frames=FORWARD), block(size - 12 * MIB, "inactive")]
        segments.append(segment(address, *blocks))
    return segments, history


def examined(tmp_path: Path, content: dict[str, Any]) -> PostMortem:
    """Imports a snapshot and examines its failure."""
    imported = import_file(write(tmp_path / "s.pickle", content), block_sizes=imported_block_sizes)
    write_trace(tmp_path / "run.memprof", imported.ranks)
    found = examine(Trace.open(tmp_path / "run.memprof"))
    assert found is not None
    assert found.room is not None
    room = found.room
    assert room.used_bytes == found.allocated_bytes
    assert room.used_bytes + room.scattered_bytes + room.idle_bytes == found.reserved_bytes
    assert found.held is not None
    assert found.held.total_bytes == room.used_bytes
    return found


def test_fragmentation_that_expandable_segments_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """12 MiB at the front of each of six segments scatter 828 MiB; growing ones had room for 220 more."""
    segments, history = rising(6, keeps=True)
    found = examined(tmp_path, snapshot(segments, [*history, failed(220 * MIB, 30 * MIB)]))
    room = found.room
    assert room is not None
    assert (room.scattered_bytes, room.idle_bytes, room.largest_hole_bytes) == (828 * MIB, 0, 188 * MIB)
    assert (room.fits_after_empty_cache, room.fits_expandable, found.is_fragmented) == (False, True, True)
    assert main(["report", str(tmp_path / "run.memprof")]) == 0
    page = capsys.readouterr().out
    assert "930.00 MiB is what torch could use: 72.00 MiB in use + 828.00 MiB cached and scattered" in page
    assert "This is fragmentation: with PYTORCH_ALLOC_CONF=expandable_segments:True" in page
    assert "by line: 72.00 MiB model.py:3" in page
    assert main(["report", str(tmp_path / "run.memprof"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["out_of_memory"]
    assert said["room"]["is_fragmented"]
    assert said["held"]["by_line"] == [{"line": "model.py:3", "bytes": 72 * MIB}]


def test_what_is_too_much_by_any_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What no setting could serve is not called fragmentation, however much is scattered; what is missing is said."""
    segments, history = rising(6, keeps=True)
    found = examined(tmp_path, snapshot(segments, [*history, failed(1000 * MIB, 30 * MIB)]))
    assert found.room is not None
    assert (found.room.short_bytes, found.room.fits_expandable, found.is_fragmented) == (142 * MIB, False, False)
    assert main(["report", str(tmp_path / "run.memprof")]) == 0
    assert "142.00 MiB are missing even with all that is free in one piece" in capsys.readouterr().out


def test_whole_free_segments_are_no_fragmentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is cached in segments that nothing uses is usable: it would be released, and the request would fit."""
    segments, history = rising(3, keeps=False)
    found = examined(tmp_path, snapshot(segments, [*history, failed(200 * MIB, 0)]))
    assert found.room is not None
    assert (found.room.idle_bytes, found.room.scattered_bytes) == (360 * MIB, 0)
    assert (found.room.fits_after_empty_cache, found.is_fragmented) == (True, False)
    assert main(["report", str(tmp_path / "run.memprof")]) == 0
    assert "fits in what is free once torch.cuda.empty_cache() has run" in capsys.readouterr().out


def test_little_scattered_memory_is_no_fragmentation(tmp_path: Path) -> None:
    """Below 64 MiB of scattered memory, the verdict is that nearly all was in use."""
    history = [entry("segment_alloc", 0, 20 * MIB), entry("alloc", 0, 9 * MIB), entry("alloc", 9 * MIB, 3 * MIB)]
    whole = segment(0, block(9 * MIB, "inactive"), block(3 * MIB), block(8 * MIB, "inactive"))
    found = examined(tmp_path, snapshot([whole], [*history, *freed(0, 9 * MIB), failed(9 * MIB + 1, 0)]))
    assert found.room is not None
    assert (found.room.scattered_bytes, found.is_fragmented) == (17 * MIB, False)


def test_a_failure_that_the_job_survived_is_caught(tmp_path: Path) -> None:
    """Allocations after it show that the job went on."""
    segments, history = rising(2, keeps=True)
    later = [failed(500 * MIB, 0), entry("alloc", 12 * MIB, 9 * MIB, FORWARD), *freed(12 * MIB, 9 * MIB)]
    found = examined(tmp_path, snapshot(segments, [*history, *later]))
    assert found.is_caught
