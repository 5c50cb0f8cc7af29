"""Recordings written as memory snapshots: torch's own tools read them, and so does memprof's model."""

from __future__ import annotations

import pickle
import pickletools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.cuda import _memory_viz

from memprof.cli.main import main
from memprof.errors import BadInputError
from memprof.trace.importers import import_file
from memprof.trace.schema import NONE, Storages
from memprof.trace.store import Trace
from tests.analysis.plain_snapshot import exported, plain_snapshot
from tests.building import Op, Storage, make_trace
from tests.replay.allocator.recorded import compare
from tests.replay.allocator.snapshots import read_devices

SAMPLES = sorted(Path(__file__).parents[2].glob("sample_traces/*/run.memprof"))
#: Opcodes that torch's MemoryViz.js reads, of those that pickles of protocol 4 have.
_VIEWER = {
    *(
        "APPEND",
        "APPENDS",
        "BINFLOAT",
        "BINGET",
        "BININT",
        "BININT1",
        "BININT2",
        "BINUNICODE",
        "EMPTY_DICT",
        "EMPTY_LIST",
    ),
    *("EMPTY_TUPLE", "FRAME", "LONG1", "LONG_BINGET", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO"),
    *("SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


@pytest.fixture(params=SAMPLES, ids=lambda path: path.parent.name)
def trace(request: pytest.FixtureRequest) -> Trace:
    return Trace.open(request.param)


def test_torchs_own_tools_read_it(trace: Trace) -> None:
    """Every function of torch.cuda._memory_viz that takes a snapshot takes this one."""
    data: Any = pickle.loads(exported(trace))
    assert "segments:" in _memory_viz.segsum(data)
    assert "cudaMalloc(" in _memory_viz.trace(data)
    for view in (_memory_viz.segments, _memory_viz.memory):
        lines = view(data, format_flamegraph=lambda text: text)
        assert sum(int(line.rpartition(" ")[2]) for line in lines.splitlines()) > 0
    assert _memory_viz.compare(data["segments"], data["segments"], format_flamegraph=lambda text: text) == ""
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in plot(data)


def test_it_holds_what_a_snapshot_built_row_by_row_holds(trace: Trace) -> None:
    """Every event, segment and block, with keys in torch's order, is as if made one by one."""
    data, expected = pickle.loads(exported(trace)), plain_snapshot(trace)
    assert data == expected
    assert list(data) == list(expected)
    (history,) = data["device_traces"]
    keys = ["action", "addr", "size", "stream", "time_us", "compile_context", "user_metadata", "pool_id", "frames"]
    assert {tuple(entry) for entry in history} == {tuple(keys)}


def test_chunks_make_no_difference(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written 7 requests at a time, the content is the same."""
    monkeypatch.setattr("memprof.analysis.export.snapshot_export._CHUNK", 7)
    assert pickle.loads(exported(trace)) == plain_snapshot(trace)


def test_imported_again_it_has_the_categories_of_the_recording(trace: Trace, tmp_path: Path) -> None:
    """What is alive at the end is, by category, what it was: to the byte."""

    def at_end(storages: Storages) -> dict[str, int]:
        is_alive = (storages.freed_op_id == NONE) & (storages.requested_bytes > 0)
        found: Counter[str] = Counter()
        for name, size in zip(storages.category[is_alive], storages.requested_bytes[is_alive], strict=True):
            found[str(name)] += int(size)
        return dict(found)

    (tmp_path / "s.pickle").write_bytes(exported(trace))
    ((_, tables),) = import_file(tmp_path / "s.pickle").ranks
    again = tables[Storages]
    assert isinstance(again, Storages)
    assert at_end(again) == at_end(trace.table(Storages))


def test_what_is_alive_at_the_end_is_in_it(trace: Trace) -> None:
    """Bytes asked for by the blocks in use are those of the storages that outlive the recording."""
    data: Any = pickle.loads(exported(trace))
    storages = trace.table(Storages)
    is_alive = (storages.freed_op_id == NONE) & (storages.allocated_bytes > 0)
    assert sum(segment["requested_size"] for segment in data["segments"]) == int(
        storages.requested_bytes[is_alive].sum()
    )
    for segment in data["segments"]:
        blocks = segment["blocks"]
        assert sum(block["size"] for block in blocks) == segment["total_size"]
        used = [block for block in blocks if block["state"] == "active_allocated"]
        assert sum(block["size"] for block in used) == segment["allocated_size"]


def test_its_history_is_whole(trace: Trace, tmp_path: Path) -> None:
    """Replayed from nothing, its events lead to its segments and blocks: nothing is missing."""
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(exported(trace))
    (device,) = read_devices(path)
    compared = compare(device.events, device.end)
    assert compared.is_complete
    assert compared.mismatches == []
    assert compared.allocations > 0
    assert np.count_nonzero(device.events.action == "free_requested") == np.count_nonzero(
        device.events.action == "free_completed"
    )


def test_nothing_in_it_is_a_name_to_import(trace: Trace) -> None:
    """It is made of dictionaries, lists, texts and numbers, in protocol 4."""
    content = exported(trace)
    names = {opcode.name for opcode, _, _ in pickletools.genops(content)}
    assert not names & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ"}
    assert content[:2] == b"\x80\x04"


def test_torchs_viewer_in_the_browser_reads_it(trace: Trace) -> None:
    """Its opcodes are those of MemoryViz.js, in batches that are no longer than those of Python's pickler."""
    batch = longest = 0
    for opcode, _, _ in pickletools.genops(exported(trace)):
        assert opcode.name in _VIEWER, opcode.name
        batch = 0 if opcode.name == "APPENDS" else batch + (opcode.name == "SETITEMS")
        longest = max(longest, batch)
    assert 0 < longest <= 2 * 1000 + 10


def test_an_event_says_what_it_is_about() -> None:
    """Frames and words of an allocation: where it was made, and what for."""
    trace = make_trace(
        [[Op("aten.relu.default", makes=["x"], module="layers.0", stack="train.py:7:step", frees=["x"])]],
        [Storage("x", 4096, requested=4000, module="layers.0")],
    )
    data: Any = pickle.loads(exported(trace))
    taken, made, asked, done = data["device_traces"][0]
    assert (taken["action"], taken["size"]) == ("segment_alloc", 2 << 20)
    assert (made["action"], made["size"], made["addr"]) == ("alloc", 4000, taken["addr"])
    assert made["user_metadata"] == "activation aten.relu.default in layers.0"
    assert made["frames"] == [{"filename": "train.py", "line": 7, "name": "step"}]
    assert [asked["action"], done["action"]] == ["free_requested", "free_completed"]


def test_a_recording_without_memory_is_refused() -> None:
    """There is nothing to write a snapshot of."""
    with pytest.raises(BadInputError, match="contains no memory"):
        exported(make_trace([[Op()]], []))


def test_the_command_writes_the_file_and_replaces_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`memprof export` says what it wrote; a file that is there stays unless -f is given."""
    path = tmp_path / "snapshot.pickle"
    arguments = ["export", str(SAMPLES[0]), "--to", "snapshot", "-o", str(path)]
    assert main(arguments) == 0
    assert "wrote" in capsys.readouterr().err
    before = path.read_bytes()
    assert main(arguments) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*arguments, "-f"]) == 0
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["snapshot.pickle"]
