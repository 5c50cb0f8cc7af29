"""Histories that leave out entries, and files in other forms than the usual pickle."""

from __future__ import annotations

import base64
import bz2
import json
import lzma
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memprof.analysis.allocator.imported_parts import imported_block_sizes
from memprof.analysis.report.report import build_report
from memprof.errors import BadInputError
from memprof.trace.importers.importing import Imported, import_file
from memprof.trace.schema import AllocatorEvents, Annotations, Memory, Stacks, Storages
from memprof.trace.store import Trace, write_trace
from tests.analysis.plain_snapshot import exported
from tests.trace.importers.writing import DATA, FORWARD, MIB, block, entry, freed, segment, small_job, snapshot, write

#: Small real ones: the others say the same, and take ten times as long.
SNAPSHOTS = sorted(path for path in (DATA / "snapshots").glob("*.pickle") if path.stat().st_size < 700_000)
real = pytest.mark.parametrize(
    "file",
    [pytest.param(path, id=path.name[:20]) for path in SNAPSHOTS]
    or [pytest.param(None, marks=pytest.mark.skip(reason="shared/data is absent"))],
)


def read(path: Path) -> Imported:
    """Imports with the sizes of blocks, as the command does."""
    return import_file(path, block_sizes=imported_block_sizes)


def opened(imported: Imported, path: Path) -> Trace:
    """Writes and opens what was imported."""
    write_trace(path, imported.ranks)
    return Trace.open(path)


def without(content: dict[str, Any], *actions: str) -> dict[str, Any]:
    """Leaves out entries, as ``_record_memory_history(skip_actions=...)`` does."""
    traces = [[one for one in trace if one["action"] not in actions] for trace in content["device_traces"]]
    return {**content, "device_traces": traces}


@real
@pytest.mark.parametrize("action", ["free_requested", "free_completed"])
def test_one_of_a_frees_two_entries_is_enough(file: Path, action: str, tmp_path: Path) -> None:
    """Peaks, start and end of real histories are the same without either of a free's entries."""
    content = pickle.loads(file.read_bytes())
    if not isinstance(content, dict) or all(len(trace) < 2 for trace in content["device_traces"]):
        pytest.skip("it has no history")
    whole = read(file).devices
    for one, other in zip(whole, read(write(tmp_path / "s.pickle", without(content, action))).devices, strict=True):
        skipped = {"entries", "actions"}
        assert {key: one[key] for key in one.keys() - skipped} == {key: other[key] for key in one.keys() - skipped}


def test_a_history_without_what_matters_is_not_called_complete(tmp_path: Path) -> None:
    """Without allocations, or without frees, the report's first warning names what is missing."""
    history = [entry("alloc", 0, MIB), *freed(0, MIB), entry("alloc", 0, MIB), entry("alloc", MIB, MIB), *freed(0, MIB)]
    whole = snapshot([segment(0, block(MIB, "inactive"), block(MIB), block(18 * MIB, "inactive"))], history)
    for missing in (["alloc"], ["free_requested", "free_completed"]):
        imported = read(write(tmp_path / "s.pickle", without(whole, *missing)))
        assert imported.devices[0]["missing_actions"] == missing
        assert not imported.devices[0]["history_complete"]
        assert any(" and ".join(missing) in remark for remark in imported.remarks)
        warnings = [
            note.text for note in build_report(opened(imported, tmp_path / "run.memprof")).notes if note.is_warning
        ]
        assert " and ".join(missing) in warnings[0]
        (tmp_path / "run.memprof").unlink()


def test_a_segment_released_without_an_entry_is_noticed(tmp_path: Path) -> None:
    """Memory allocated outside every segment shows that a segment_free is missing."""
    history = [entry("alloc", 64 * MIB, MIB), *freed(64 * MIB, MIB), entry("alloc", 0, 2 * MIB)]
    device = read(write(tmp_path / "s.pickle", snapshot([segment(0, block(2 * MIB))], history))).devices[0]
    assert device["missing_actions"] == ["segment_free"]


def test_a_block_that_is_not_split_counts_whole(tmp_path: Path) -> None:
    """19.5 MiB in a segment of 20 leave 0.5, which is too little to split off: the block has 20 MiB at the peak."""
    size = 39 * MIB // 2
    history = [entry("segment_alloc", 0, 20 * MIB), entry("alloc", 0, size), *freed(0, size)]
    path = write(tmp_path / "s.pickle", snapshot([segment(0, block(20 * MIB, "inactive"))], history))
    assert import_file(path).devices[0]["peak_allocated_bytes"] == size
    imported = read(path)
    assert imported.devices[0]["peak_allocated_bytes"] == 20 * MIB
    trace = opened(imported, tmp_path / "run.memprof")
    assert trace.table(Memory).allocated_bytes.max() == 20 * MIB
    assert trace.table(AllocatorEvents).block_bytes.tolist() == [-1, 20 * MIB, 20 * MIB, -1]


@real
def test_an_export_of_an_import_says_the_same(file: Path, tmp_path: Path) -> None:
    """A snapshot that is imported and exported again holds the same history, segments and figures."""
    imported = read(file)
    (tmp_path / "again.pickle").write_bytes(exported(opened(imported, tmp_path / "run.memprof")))
    assert read(tmp_path / "again.pickle").devices == imported.devices


def test_an_export_keeps_failures_releases_and_what_the_job_said(tmp_path: Path) -> None:
    """An oom keeps its free bytes, a segment_free its address; so do pools, contexts, metadata and annotations."""
    history = [
        entry("alloc", 8 * MIB, MIB, FORWARD, time_us=5, user_metadata="batch 3", compile_context="compiled 0/1"),
        entry("segment_free", 64 * MIB, 2 * MIB, time_us=6, compile_context="N/A"),
        {"action": "oom", "device_free": 77, "size": 9 * MIB, "stream": 0, "time_us": 7},
    ]
    spans = [
        {"name": "Optimizer.step#SGD.step", "stage": stage, "device": 0, "time_us": 4} for stage in ("START", "END")
    ]
    content = snapshot([segment(8 * MIB, block(MIB), segment_pool_id=(0, 3))], history, external_annotations=spans)
    trace = opened(read(write(tmp_path / "s.pickle", content)), tmp_path / "run.memprof")
    events, named = trace.table(AllocatorEvents), trace.table(Annotations)
    assert events.pool.tolist()[0] == "0,3"
    assert (events.user_metadata[0], events.compile_context.tolist()) == ("batch 3", ["compiled 0/1", "", ""])
    assert (named.name.tolist(), named.start_us.tolist(), named.end_us.tolist()) == ([spans[0]["name"]], [4.0], [4.0])
    written = pickle.loads(exported(trace))
    (first, released, failed), again = written["device_traces"][0], written["segments"][0]
    assert (first["addr"], first["user_metadata"], first["compile_context"]) == (8 * MIB, "batch 3", "compiled 0/1")
    assert (released["action"], released["addr"], failed["device_free"]) == ("segment_free", 64 * MIB, 77)
    assert (again["address"], again["segment_pool_id"], again["blocks"][0]["state"]) == (
        8 * MIB,
        (0, 3),
        "active_allocated",
    )
    assert written["external_annotations"] == spans


def test_nodes_of_fx_are_kept_with_the_stack(tmp_path: Path) -> None:
    """What torch adds to a frame of generated code is in a column of its own."""
    frames = [{**FORWARD[0], "fx_node_op": "call_function", "fx_node_name": "add_1", "fx_original_trace": "x = y + z"}]
    content = snapshot([segment(0, block(MIB, frames=frames))])
    trace = opened(read(write(tmp_path / "s.pickle", content)), tmp_path / "run.memprof")
    assert trace.table(Stacks).fx_nodes.tolist() == ["call_function add_1 x = y + z"]


def test_repeated_and_impossible_segments_are_noted(tmp_path: Path) -> None:
    """A segment given twice counts once; one of 2 TiB, one of uneven blocks and one that overlaps are pointed out."""
    one = segment(0, block(MIB))
    odd = {**segment(16 * MIB, block(MIB)), "total_size": 2 * MIB}
    content = snapshot([one, one, odd, {**segment(17 * MIB), "total_size": 1 << 41}])
    imported = read(write(tmp_path / "s.pickle", content))
    assert imported.devices[0]["segments"] == 3
    notes = " ".join(imported.ranks[0][0].notes)
    for words in (
        " at the address of another one",
        " of an impossible size",
        " whose blocks do not add up",
        " that overlaps the one before",
    ):
        assert f"the snapshot has 1 segment{words}" in notes


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_every_protocol_is_read(protocol: int, tmp_path: Path) -> None:
    """A snapshot says the same in every protocol."""
    usual = read(write(tmp_path / "usual.pickle", small_job())).devices
    assert read(write(tmp_path / "other.pickle", small_job(), protocol)).devices == usual


def test_zeros_behind_the_end_and_every_compression_are_read(tmp_path: Path) -> None:
    """torch pads a page's pickle with zeros; xz and bzip2 are unpacked like gzip."""
    data = pickle.dumps(small_job(), protocol=4)
    usual = read(write(tmp_path / "usual.pickle", small_job())).devices
    for changed in (data + b"\0\0", lzma.compress(data), bz2.compress(data), bz2.compress(data) + bz2.compress(b"\0")):
        (tmp_path / "other.pickle").write_bytes(changed)
        assert read(tmp_path / "other.pickle").devices == usual
    (tmp_path / "cut.pickle").write_bytes(lzma.compress(data)[:-20])
    with pytest.raises(BadInputError, match="cut short: its xz stream has no end"):
        read(tmp_path / "cut.pickle")
    (tmp_path / "bomb.pickle").write_bytes(bz2.compress(b"\x80\x04" + bytes(70 << 20)))
    with pytest.raises(BadInputError, match="no trace does"):
        read(tmp_path / "bomb.pickle")


def test_times_may_be_fractions(tmp_path: Path) -> None:
    """A time of half a microsecond is kept; one that no clock has is unknown."""
    history = [entry("alloc", 0, MIB, time_us=1.5), *freed(0, MIB, time_us=float("inf"))]
    trace = opened(read(write(tmp_path / "s.pickle", snapshot((), history))), tmp_path / "run.memprof")
    times = trace.table(AllocatorEvents).time_us
    assert times[0] == 1.5
    assert np.isnan(times[1:]).all()


PROFILED = ["parameter", "optimizer_state", "input", "temporary", "activation", "gradient", "temporary", "unknown"]


def test_a_memory_timeline_has_the_profilers_categories(tmp_path: Path) -> None:
    """Bytes by category over time become storages: every row's sums are those of the file."""
    times = [10, 20, 30, 40]
    sizes = [
        [0, 100, 0, 0, 0, 0, 0, 0, 0],
        [0, 100, 0, 8, 0, 50, 0, 0, 3],
        [0, 100, 40, 8, 0, 20, 60, 0, 3],
        [0, 100, 40, 0, 0, 0, 0, 7, 0],
    ]
    (tmp_path / "t.json").write_text(json.dumps([times, sizes]))
    imported = read(tmp_path / "t.json")
    trace = opened(imported, tmp_path / "run.memprof")
    storages = trace.table(Storages)
    assert imported.kind == "timeline"
    assert trace.table(Memory).allocated_bytes.max() == sum(sizes[2])
    left = storages.freed_op_id == -1
    sums = {name: int(storages.allocated_bytes[left & (storages.category == name)].sum()) for name in set(PROFILED)}
    assert sums == {"parameter": 100, "optimizer_state": 40, "temporary": 7} | dict.fromkeys(
        ("input", "activation", "gradient", "unknown"), 0
    )


def test_single_changes_of_a_memory_timeline_are_read(tmp_path: Path) -> None:
    """The raw form lists changes with action and category; what was there before has no time."""
    rows = [[-1, 1, 64, 0], [5000, 2, 32, 4], [6000, 4, -32, 4], [7000, 3, -64, 0], [7000, 3, 64, 5]]
    (tmp_path / "t.raw.json").write_text(json.dumps(rows))
    trace = opened(read(tmp_path / "t.raw.json"), tmp_path / "run.memprof")
    assert trace.table(Storages).category.tolist() == ["parameter", "activation", "gradient"]
    assert trace.table(Memory).allocated_bytes.max() == 96


@pytest.mark.parametrize(("size", "device"), [(4, "cpu"), (512, "unknown")])
def test_a_memory_timeline_is_of_no_device_that_it_does_not_show(size: int, device: str, tmp_path: Path) -> None:
    """Blocks smaller than CUDA's are the CPU's; others may be of any device. What is unused is not in it.

    The tensor of 100 bytes was there before the profiler, with the size of its elements, so it shows nothing.
    """
    changes = [[1000 * row, 2, size, 7] for row in range(1, 5)]
    raw = [[-1, 1, 100, 0], *changes]
    sums = [[0, 100, 0, 0, 0, 0, 0, 0, size * row] for row in range(5)]
    for content in (raw, [[1, 2, 3, 4, 5], sums]):
        (tmp_path / "t.json").write_text(json.dumps(content))
        result = read(tmp_path / "t.json")
        (found,) = result.devices
        assert found["device"] == device
        assert found["peak_allocated_bytes"] == found["end_allocated_bytes"] == 100 + 4 * size
        assert not found["history_complete"]
        assert found["start_allocated_bytes"] is None
        assert result.ranks[0][0].machine.device_kind == device


def test_pictures_and_other_json_are_told_apart(tmp_path: Path) -> None:
    """A timeline that is only a picture is named as one, with what to export; other lists are no timeline."""
    (tmp_path / "t.html").write_text("<html><body><img src='data:image/png;base64,AAAA'></body></html>")
    with pytest.raises(BadInputError, match=r"as a picture.*\.raw\.json\.gz"):
        read(tmp_path / "t.html")
    for text in ("[[1, 2], [3]]", "[[], []]", '[[1], [["a"]]]', "[[1, 2, 3, 99]]", "[[1"):
        (tmp_path / "t.json").write_text(text)
        with pytest.raises(BadInputError):
            read(tmp_path / "t.json")


def test_a_page_of_profile_plot_keeps_categories_and_the_cpu(tmp_path: Path) -> None:
    """Its last device is the CPU, its categories are the profiler's, and torch's version is not made up."""
    history = [
        entry("alloc", 4096, 512, [], category="parameter"),
        entry("alloc", 8192, 256, [], category="autograd_detail"),
    ]
    whole = {"device": 0, "address": 4096, "total_size": 4352, "stream": 0}
    whole["blocks"] = [block(512), {"size": 3584, "state": "inactive"}, block(256)]
    buffer = pickle.dumps({"device_traces": [history], "segments": [whole]}) + b"\0\0"
    page = json.dumps([{"name": "snapshot.pickle", "base64": base64.b64encode(buffer).decode()}])
    (tmp_path / "p.html").write_text(f"<html><script>{page}</script></html>")
    trace = opened(read(tmp_path / "p.html"), tmp_path / "run.memprof")
    assert trace.table(Storages).category.tolist() == ["parameter", "temporary"]
    assert set(trace.table(Storages).device.tolist()) == {"cpu"}
    assert trace.manifest.machine.device_kind == "cpu"
    assert "lower bound" in trace.manifest.capture.reason
    assert trace.manifest.torch_version == ""


def test_an_export_keeps_what_was_pending_before_the_history(tmp_path: Path) -> None:
    """A block that waits for another stream since before the history is written as one that waits."""
    history = [entry("alloc", 8 * MIB, MIB, FORWARD), *freed(8 * MIB, MIB)]
    blocks = [block(MIB), block(2 * MIB, "active_pending_free", requested_size=2 * MIB - 1)]
    content = snapshot([segment(0, *blocks), segment(8 * MIB, block(MIB, "inactive"))], history)
    imported = read(write(tmp_path / "s.pickle", content))
    (tmp_path / "again.pickle").write_bytes(exported(opened(imported, tmp_path / "run.memprof")))
    assert read(tmp_path / "again.pickle").devices == imported.devices
    again = pickle.loads((tmp_path / "again.pickle").read_bytes())["segments"][0]["blocks"]
    assert [(one["state"], one["requested_size"]) for one in again] == [
        ("active_allocated", MIB),
        ("active_pending_free", 2 * MIB - 1),
    ]
