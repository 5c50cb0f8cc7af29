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

from memprof.analysis.export.snapshot_export import describe_allocations
from memprof.analysis.report.saved import PERMANENT
from memprof.cli.main import main
from memprof.errors import BadInputError
from memprof.replay.allocator.events import ALLOCATE, Requests
from memprof.replay.allocator.recorded_requests import requests_of_trace
from memprof.replay.allocator.steps import StepRequests
from memprof.trace.importers.importing import import_file
from memprof.trace.manifest import Manifest
from memprof.trace.schema import NONE, Modules, Ops, Saved, Storages
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


def test_imported_again_it_is_what_was_recorded(trace: Trace, tmp_path: Path) -> None:
    """What is alive at the end has its category, name, module, and its saver for backward, to the byte.

    Operators that allocate keep their names and phases, and the modules that they and the storages name are there.
    """
    (tmp_path / "s.pickle").write_bytes(exported(trace))
    ((manifest, tables),) = import_file(tmp_path / "s.pickle").ranks
    again = Trace.of([(manifest, tables)], tmp_path / "again.memprof")
    assert _at_end(again) == _at_end(trace)
    issued, ops = requests_of_trace(trace), trace.table(Ops)
    made = Counter(zip(ops.name[issued.made_by], ops.phase[issued.made_by], strict=True))
    rows = again.table(Ops).take(slice(1, None))
    found = Counter(zip(rows.name, rows.phase, strict=True))
    is_before = issued.made_by == NONE  # without an operator: named by its stack
    assert sum((made - found).values()) <= is_before.sum()
    types = dict(zip(trace.table(Modules).name, trace.table(Modules).type, strict=True))
    named = again.table(Modules)
    assert named.name.tolist()
    assert all(types[name] == kind for name, kind in zip(named.name, named.type, strict=True) if kind)
    saved = trace.table(Saved)
    kept = set(saved.storage_id[~np.isin(trace.table(Storages).category[saved.storage_id], PERMANENT)].tolist())
    savers = [text for text in again.table(Storages).metadata.tolist() if text]
    assert len(savers) == len(kept & set(issued.storage_id.tolist()))
    assert all(text.startswith("saved for backward by ") for text in savers)


def _at_end(trace: Trace) -> dict[tuple[str, str, str], int]:
    storages, modules = trace.table(Storages), [*trace.table(Modules).name.tolist(), ""]
    is_alive = (storages.freed_op_id == NONE) & (storages.requested_bytes > 0)
    found: Counter[tuple[str, str, str]] = Counter()
    for row in np.flatnonzero(is_alive).tolist():
        key = storages.category[row], storages.name[row], modules[storages.module_id[row]]
        found[key] += int(storages.requested_bytes[row])
    return dict(found)


def test_an_export_of_an_earlier_memprof_keeps_its_categories(tmp_path: Path) -> None:
    """Version 1.0 wrote a text such as "activation aten.relu.default in layers.0": it is metadata."""
    data: Any = pickle.loads(exported(Trace.open(SAMPLES[0])))
    for entry in data["device_traces"][0]:
        note = entry["user_metadata"]
        entry["user_metadata"] = note and f"{note['category']} aten.relu.default in layers.0"
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(data, protocol=4))
    ((_, tables),) = import_file(tmp_path / "s.pickle").ranks
    again: Any = tables[Storages]
    assert set(again.category_source) == {"profiler"}
    assert set(again.metadata) == {f"{name} aten.relu.default in layers.0" for name in set(again.category)}


@pytest.mark.parametrize("text", ["input batch", "activation relu in the tower", "temporary"])
def test_words_of_others_are_no_categories(text: str, tmp_path: Path) -> None:
    """A job's own metadata that begins with a category's name leaves categories to the analysis, and stays metadata."""
    data: Any = pickle.loads(exported(Trace.open(SAMPLES[0])))
    for entry in data["device_traces"][0]:
        entry["user_metadata"] = text
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(data, protocol=4))
    ((_, tables),) = import_file(tmp_path / "s.pickle").ranks
    found: Any = tables[Storages]
    assert "profiler" not in found.category_source
    assert len(set(found.category)) > 1
    assert text in found.metadata


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
    """Frames and metadata of an allocation: where and in which phase it was made, what for, and what saves it."""
    trace = make_trace(
        [
            [
                Op("aten.relu.default", makes=["x"], saves=["x"], module="layers.0", stack="train.py:7:step"),
                Op("aten.mul.Tensor", phase="backward", forward=0, reads=["x"], frees=["x"]),
            ]
        ],
        [Storage("x", 4096, requested=4000, module="layers.0")],
    )
    data: Any = pickle.loads(exported(trace))
    taken, made, asked, done = data["device_traces"][0]
    assert (taken["action"], taken["size"]) == ("segment_alloc", 2 << 20)
    assert (made["action"], made["size"], made["addr"]) == ("alloc", 4000, taken["addr"])
    assert made["user_metadata"] == {
        "category": "activation",
        "operator": "aten.relu.default",
        "module": "layers.0 (Linear)",
        "phase": "forward",
        "saved for backward by": "aten.relu.default in layers.0",
    }
    assert made["frames"] == [{"filename": "train.py", "line": 7, "name": "step"}]
    assert [asked["action"], done["action"]] == ["free_requested", "free_completed"]


def test_descriptions_of_a_large_model_are_right() -> None:
    """Of tens of thousands of names, modules, operators and savers, there are more combinations than 64 bits count."""
    count = 40_000
    made = Ops.of(
        op_id=np.arange(count),
        name=[f"my.op{row}.default" for row in range(count)],
        phase=["forward"] * count,
        module_id=np.arange(count),
        kind=["compute"] * count,
    )
    names = [f"layers.{row}" for row in range(count)]
    tables = {
        Ops: made,
        Modules: Modules.of(module_id=np.arange(count), name=names, type=["Linear"] * count, parent_id=[NONE] * count),
        Storages: Storages.of(
            storage_id=np.arange(count),
            category=["activation", "gradient"] * (count // 2),
            name=[f"x{row}" for row in range(count)],
            module_id=np.arange(count),
        ),
        Saved: Saved.of(storage_id=np.arange(count), forward_op_id=np.arange(count), module_id=np.arange(count)),
    }
    trace = Trace.of([(Manifest(), tables)], "large.memprof")
    rows = np.arange(count)
    requests = Requests.of(np.full(count, ALLOCATE), rows, rows + 1)
    notes, index = describe_allocations(trace, StepRequests(requests, 0, rows, rows, rows, "cuda:0"))
    for row in (0, 1, 777, count - 1):
        assert notes[index[row]] == {
            "category": ("activation", "gradient")[row % 2],
            "name": f"x{row}",
            "operator": f"my.op{row}.default",
            "module": f"layers.{row} (Linear)",
            "phase": "forward",
            "saved for backward by": f"my.op{row}.default in layers.{row}",
        }


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
