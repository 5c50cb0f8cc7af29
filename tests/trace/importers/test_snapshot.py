"""Snapshots written by hand become traces whose every figure is known."""

from __future__ import annotations

import base64
import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memprof.analysis.report.report import build_report
from memprof.errors import BadInputError, UsageError
from memprof.trace.importers.importing import import_file
from memprof.trace.schema import NONE, AllocatorEvents, Memory, Ops, Segments, Stacks, Steps, Storages
from memprof.trace.store import Trace, write_trace
from tests.trace.importers.writing import (
    BACKWARD,
    FORWARD,
    MIB,
    OPTIMIZER,
    TRAIN,
    block,
    entry,
    frame,
    freed,
    segment,
    small_job,
    snapshot,
    write,
)


def imported(tmp_path: Path, content: Any, **choices: Any) -> Trace:
    """Imports something, writes it, opens it, and checks every step."""
    result = import_file(write(tmp_path / "snapshot.pickle", content), **choices)
    write_trace(tmp_path / "run.memprof", result.ranks)
    trace = Trace.open(tmp_path / "run.memprof")
    for rank in trace.ranks:
        for number in trace.rank_trace(rank).table(Steps).step.tolist():
            trace.rank_trace(rank).step(number).check()
    return trace


def test_everything_alive_before_the_window_is_there_from_the_start(tmp_path: Path) -> None:
    """What was in use before is present in the first row, be it freed in the window or never."""
    trace = imported(tmp_path, small_job())
    assert trace.table(Memory).allocated_bytes.tolist() == [4 * MIB, 6 * MIB, 8 * MIB, 7 * MIB]
    storages = trace.table(Storages)
    assert storages.allocated_bytes[storages.created_op_id == NONE].tolist() == [MIB, 3 * MIB]


def test_what_is_freed_is_freed_once(tmp_path: Path) -> None:
    """A free is requested and completed: it takes memory away at the request, and only then."""
    trace = imported(tmp_path, small_job())
    storages = trace.table(Storages)
    lives = list(zip(storages.created_op_id.tolist(), storages.freed_op_id.tolist(), strict=True))
    # 1 MiB freed after row 1, 3 MiB left alone, then the three of the window; row 0 is the beginning.
    assert lives == [(NONE, 1), (NONE, NONE), (1, 2), (2, NONE), (3, NONE)]


def test_sizes_are_those_of_blocks_where_known_and_rounded_elsewhere(tmp_path: Path) -> None:
    """Requested bytes are kept in addition to allocated bytes."""
    content = snapshot([segment(0, block(1024, requested_size=3))], [entry("alloc", 4096, 5), *freed(4096, 5)])
    storages = imported(tmp_path, content).table(Storages)
    assert storages.requested_bytes.tolist() == [3, 5]
    assert storages.allocated_bytes.tolist() == [1024, 512]


def test_reserved_bytes_are_counted_backwards_from_the_end(tmp_path: Path) -> None:
    """The segment taken for an allocation is there when it is made: 12 MiB at the end, 4 of them of the window."""
    trace = imported(tmp_path, small_job())
    assert trace.table(Memory).reserved_bytes.tolist() == [8 * MIB, 8 * MIB, 12 * MIB, 12 * MIB]


def test_phases_lines_and_operators_come_from_stacks(tmp_path: Path) -> None:
    """Frames of modules, of autograd and of optimizers give the phase; the line is the job's own."""
    trace = imported(tmp_path, small_job())
    ops, stacks = trace.table(Ops), trace.table(Stacks)
    assert ops.phase.tolist() == ["other", "forward", "backward", "optimizer"]
    assert ops.name.tolist() == ["(recording begins)", "forward", "aten.mm", "main"]
    assert stacks.frames[ops.stack_id[1]].splitlines()[0] == "/job/model.py:3:forward"
    assert build_report(trace).at_peak.moment.describe() == "backward (aten.mm)"


def test_categories_follow_from_phases_stacks_and_sizes(tmp_path: Path) -> None:
    """What backward frees is an activation, what it leaves a gradient, what an optimizer sets up its state.

    Of what was there before, what backward frees is an activation, and what stays, of no gradient's size, a parameter.
    """
    trace = imported(tmp_path, small_job())
    expected = ["activation", "parameter", "activation", "gradient", "optimizer_state"]
    storages = trace.table(Storages)
    assert storages.category.tolist() == expected
    assert storages.category_source.tolist() == ["phases", "size", "phases", "phases", "stack"]
    report = build_report(trace)
    assert report.at_peak.category_sources == {
        "activation": {"phases": 2 * MIB},
        "parameter": {"size": 3 * MIB},
        "gradient": {"phases": 3 * MIB},
    }


def test_where_memory_runs_out_in_backward_forwards_memory_is_activations(tmp_path: Path) -> None:
    """Backward had not reached it."""
    kept, reached, gradient = 0, 2 * MIB, 4 * MIB
    history = [entry("alloc", kept, 2 * MIB, FORWARD), entry("alloc", reached, 2 * MIB, FORWARD)]
    history += [entry("alloc", gradient, MIB, BACKWARD), *freed(reached, 2 * MIB)]
    history += [{"action": "oom", "device_free": MIB, "size": 4 * MIB, "stream": 0, "frames": BACKWARD}]
    alive = [segment(kept, block(2 * MIB)), segment(gradient, block(MIB))]
    categories = imported(tmp_path, snapshot(alive, history)).table(Storages).category
    assert categories.tolist()[:2] == ["activation", "activation"]


def test_the_allocators_events_are_kept_in_full(tmp_path: Path) -> None:
    """Every entry is there with its address and what was asked for, after the blocks that were there before."""
    events = imported(tmp_path, small_job()).table(AllocatorEvents)
    assert events.action.tolist() == [
        *["alloc"] * 2,
        "alloc",
        *["free_requested", "free_completed"],
        "segment_alloc",
        "alloc",
        *["free_requested", "free_completed"],
        "alloc",
    ]
    assert events.index.tolist() == [NONE, NONE, *range(8)]
    assert events.op_id.tolist() == [NONE, NONE, 1, 1, 1, 1, 2, 2, 2, 3]
    assert events.address[[0, 1, 9]].tolist() == [3 * MIB, 0, 8 * MIB]
    assert events.size_bytes[9] == MIB - 1


def test_segments_are_kept_in_full(tmp_path: Path) -> None:
    """Segments come with their sizes, streams and pools."""
    content = snapshot([segment(0, block(512), segment_pool_id=(0, 3), stream=7, is_expandable=True)])
    segments = imported(tmp_path, content).table(Segments)
    assert (segments.total_size_bytes[0], segments.stream[0], segments.segment_pool[0]) == (512, 7, "0,3")
    assert segments.is_expandable[0]


def test_backward_threads_without_python_are_backward(tmp_path: Path) -> None:
    """Where stacks are of Python alone, autograd's own threads have none."""
    content = snapshot((), [entry("alloc", 0, 512, TRAIN), entry("alloc", 512, 512, [])])
    assert imported(tmp_path, content).table(Ops).phase.tolist() == ["other", "other", "backward"]


def test_a_closure_of_an_optimizer_is_forward_and_recomputing_is_backward(tmp_path: Path) -> None:
    """What runs inside decides for a closure, what runs around for a checkpoint."""
    closure, engine = [*FORWARD[:2], *OPTIMIZER[1:]], frame("/env/site-packages/torch/_tensor.py:5", "backward")
    recomputed = [*FORWARD[:2], engine, *TRAIN]
    content = snapshot((), [entry("alloc", 0, 512, closure), entry("alloc", 512, 512, recomputed)])
    assert imported(tmp_path, content).table(Ops).phase.tolist()[1:] == ["forward", "backward"]


def several_steps(annotations: bool) -> dict[str, Any]:
    """Three steps of two allocations each; the second is of the optimizer."""
    history, notes = [], []
    for number in range(3):
        time_us = 100 * number
        frames = OPTIMIZER if not annotations else TRAIN
        history += [entry("alloc", 2 * number, 512, FORWARD, time_us=time_us)]
        history += [entry("alloc", 2 * number + 1, 512, frames, time_us=time_us + 10)]
        for stage, moment in (("START", 5), ("END", 15)):
            notes.append({"name": "Optimizer.step#SGD.step", "stage": stage, "device": 0, "time_us": time_us + moment})
    history += [entry("alloc", 99, 512, FORWARD, time_us=300)]
    return snapshot((), history, **({"external_annotations": notes} if annotations else {}))


@pytest.mark.parametrize("annotations", [True, False])
def test_steps_end_with_the_optimizers_update(annotations: bool, tmp_path: Path) -> None:
    """Annotations mark steps, or stacks where there are none; the first and the last are not whole."""
    trace = imported(tmp_path, several_steps(annotations))
    steps, ops = trace.table(Steps), trace.table(Ops)
    assert ops.step.tolist() == [0, 0, 0, 1, 1, 2, 2, 3]
    assert ops.phase.tolist()[1:5] == ["forward", "optimizer", "forward", "optimizer"]
    assert steps.kind.tolist() == ["warm_up", "recorded", "recorded", "recorded"]
    assert steps.is_complete.tolist() == [True, True, True, False]
    assert steps.duration_us.tolist()[1:3] == [100.0, 100.0]
    assert trace.recorded_steps == (1, 2, 3)


def test_a_closure_inside_an_annotated_update_keeps_its_phase(tmp_path: Path) -> None:
    """An annotation says what stacks leave open, and no more."""
    notes = [
        {"name": "Optimizer.step#LBFGS.step", "stage": stage, "device": 0, "time_us": moment}
        for stage, moment in (("START", 1), ("END", 9))
    ]
    history = [
        entry("alloc", 0, 512, FORWARD, time_us=2),
        entry("alloc", 512, 512, TRAIN, time_us=3),
        entry("alloc", 1024, 512, TRAIN, time_us=10),
    ]
    trace = imported(tmp_path, snapshot((), history, external_annotations=notes))
    assert trace.table(Ops).phase.tolist()[1:] == ["forward", "optimizer", "other"]


def test_expandable_segments_grow_and_shrink(tmp_path: Path) -> None:
    """What is mapped and unmapped counts as reserved: 4 MiB at the end, 20 mapped and 18 unmapped in the window."""
    history = [
        entry("segment_map", 0, 20 * MIB),
        entry("alloc", 0, MIB),
        *freed(0, MIB),
        entry("segment_unmap", 2 * MIB, 18 * MIB),
        entry("alloc", 0, MIB),
    ]
    content = snapshot([segment(0, block(MIB), block(3 * MIB, "inactive"), is_expandable=True)], history)
    trace = imported(tmp_path, content)
    assert trace.table(Memory).reserved_bytes.tolist() == [2 * MIB, 22 * MIB, 4 * MIB]
    device = import_file(tmp_path / "snapshot.pickle").devices[0]
    assert (device["start_reserved_bytes"], device["peak_reserved_bytes"]) == (2 * MIB, 22 * MIB)


def test_a_folder_of_imported_files_is_one_recording(tmp_path: Path) -> None:
    """In a job of several processes each writes a file, the events of rank r as those of device r."""
    for rank in range(2):
        histories = [[] if device != rank else [entry("alloc", 0, 512)] * 2 for device in range(2)]
        write_trace(
            tmp_path / f"{rank}.memprof", import_file(write(tmp_path / "s.pickle", snapshot((), *histories))).ranks
        )
    assert Trace.open(tmp_path).ranks == (0, 1)


def test_out_of_memory_says_who_asked_for_how_much(tmp_path: Path) -> None:
    """An oom entry makes the capture incomplete, with line, size and what was free."""
    oom = {"action": "oom", "device_free": 3 * MIB, "size": 2048 * MIB, "stream": 0, "frames": FORWARD}
    trace = imported(tmp_path, snapshot([segment(0, block(MIB))], [entry("alloc", 0, MIB, FORWARD), oom]))
    reason = "out of memory: /job/model.py:3:forward requested 2.00 GiB while 3.00 MiB of the device were free"
    assert trace.manifest.capture.reason == reason
    assert not trace.manifest.capture.is_complete
    assert not trace.table(Steps).is_complete[-1]
    assert build_report(trace).at_peak.moment.allocated_bytes == MIB


def test_without_a_history_the_end_state_is_shown_and_how_to_record_one(tmp_path: Path) -> None:
    """Each code location has a row, and a note says that the timeline is missing."""
    content = snapshot([segment(0, block(MIB, frames=TRAIN), block(2 * MIB, frames=FORWARD), block(MIB, frames=TRAIN))])
    trace = imported(tmp_path, content)
    assert trace.table(Memory).allocated_bytes.tolist() == [0, 2 * MIB, 4 * MIB]
    assert any("_record_memory_history" in note for note in trace.manifest.notes)
    parts = build_report(trace).at_peak.by_source.parts
    lines = {part.key.place: part.bytes for part in parts if part.key is not None}
    assert lines == {"model.py:3": 2 * MIB, "train.py:9": 2 * MIB}


def test_one_entry_is_no_timeline(tmp_path: Path) -> None:
    """A free that is completed in the only entry takes nothing from the end state."""
    content = snapshot([segment(0, block(MIB))], [entry("free_completed", 8, 8)])
    result = import_file(write(tmp_path / "one.pickle", content))
    assert result.devices[0]["end_requested_bytes"] == result.devices[0]["peak_requested_bytes"] == MIB
    assert "no timeline" in result.remarks[0]


def test_memory_waiting_for_another_stream_is_active_and_not_allocated(tmp_path: Path) -> None:
    """Both names of the state are read; such blocks are freed already."""
    blocks = block(MIB), block(2 * MIB, "active_pending_free"), block(4 * MIB, "active_awaiting_free")
    trace = imported(tmp_path, snapshot([segment(0, *blocks)]))
    assert trace.table(Memory).allocated_bytes.tolist() == [MIB]
    assert trace.table(Memory).active_bytes.tolist() == [7 * MIB]


def test_blocks_of_torch_2_0_tell_no_address(tmp_path: Path) -> None:
    """They follow one another in their segment, and carry a history instead of frames."""
    old = {"size": 1024, "state": "active_allocated", "history": [{"addr": 0, "real_size": 700, "frames": TRAIN}]}
    whole = segment(4096, block(512), block(1024))
    whole["blocks"] = [{"size": 512, "state": "inactive"}, old]
    del whole["requested_size"]
    result = import_file(write(tmp_path / "old.pickle", snapshot([whole], [freed(4608, 700)[0], entry("oom", 0, 1)])))
    assert result.devices[0]["end_requested_bytes"] == 700
    assert result.ranks[0][0].torch_version == "2.0"
    assert result.ranks[0][1][Segments].requested_size_bytes.tolist() == [700]  # type: ignore[attr-defined]


def test_the_allocators_settings_are_kept_however_they_were_set(tmp_path: Path) -> None:
    """What the environment said, else what the program set."""
    settings = {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "expandable_segments": True,
        "max_split_size": 128 * MIB,
        "garbage_collection_threshold": 0.8,
    }
    trace = imported(tmp_path, snapshot([segment(0, block(512))], allocator_settings=settings))
    composed = "expandable_segments:True,max_split_size_mb:128,garbage_collection_threshold:0.8"
    assert trace.manifest.machine.allocator_settings == composed
    settings["PYTORCH_CUDA_ALLOC_CONF"] = "backend:native"
    trace = imported(tmp_path, snapshot([segment(0, block(512))], allocator_settings=settings))
    assert trace.manifest.machine.allocator_settings == "backend:native"


def test_devices_become_ranks(tmp_path: Path) -> None:
    """A device with a history or segments is a rank, numbered as the device; one may be chosen."""
    content = snapshot([segment(0, block(MIB), device=2)], [], [entry("alloc", 0, 512), entry("alloc", 512, 512)])
    trace = imported(tmp_path, content)
    assert trace.ranks == (1, 2)
    assert set(trace.rank_trace(2).table(Storages).device) == {"cuda:2"}
    alone = import_file(tmp_path / "snapshot.pickle", device=1, rank=5)
    assert [manifest.rank for manifest, _ in alone.ranks] == [5]
    with pytest.raises(UsageError, match="holds nothing of device 0; it has 1, 2"):
        import_file(tmp_path / "snapshot.pickle", device=0)
    with pytest.raises(UsageError, match="choose one with --only"):
        import_file(tmp_path / "snapshot.pickle", rank=0)


def test_a_plain_list_of_segments_is_a_snapshot(tmp_path: Path) -> None:
    """What torch.cuda.memory_snapshot() returns opens as it is."""
    result = import_file(write(tmp_path / "list.pickle", [segment(0, block(MIB))]))
    assert result.devices[0]["end_reserved_bytes"] == MIB


def test_bytes_tell_what_a_file_is_not_its_name(tmp_path: Path) -> None:
    """A pickle called .json, a gzipped pickle, and a page of memory_viz with a pickle in it all open."""
    data = pickle.dumps(small_job(), 4)
    text = base64.b64encode(data + bytes(3 - len(data) % 3)).decode()
    page = f'const local_files = [{{"name": "s.pickle", "base64": {json.dumps(text)}}}]'
    for name, content in {
        "snapshot.json": data,
        "snapshot.pickle.gz": gzip.compress(data),
        "page.html": f"<!DOCTYPE html><script>{page}</script>".encode(),
    }.items():
        (tmp_path / name).write_bytes(content)
        assert import_file(tmp_path / name).devices[0]["end_reserved_bytes"] == 12 * MIB


def test_contradictions_are_told_and_go_on(tmp_path: Path) -> None:
    """Memory freed twice, taken twice, or segments that do not add up: a note, and the rest is read."""
    history = [entry("alloc", 0, 512), entry("alloc", 0, 1024), *freed(0, 1024), *freed(0, 1024)]
    content = snapshot([segment(0, block(512, "inactive"), allocated_size=99)], history)
    notes = " ".join(imported(tmp_path, content).manifest.notes)
    assert "2 entries contradict others" in notes
    assert "segments say that 99 bytes are allocated" in notes


def test_unknown_keys_and_actions_are_no_obstacle(tmp_path: Path) -> None:
    """Newer versions add keys and actions: keys are passed over, actions named and left out."""
    history = [entry("alloc", 0, 512, new=[1]), entry("teleport", 0, 1), entry("workspace_snapshot", 0, 1)]
    trace = imported(tmp_path, snapshot((), history, news={"a": 1}))
    assert len(trace.table(AllocatorEvents)) == 1
    assert "teleport, workspace_snapshot" in " ".join(trace.manifest.notes)


BROKEN: dict[str, tuple[Any, str]] = {
    "a number": (5, "no segments and no traces"),
    "other keys": ({"state_dict": {}}, "no segments and no traces"),
    "nothing at all": (snapshot(), "held nothing and recorded nothing"),
    "segments that are a text": ({"segments": "x"}, "must be a list, not a text"),
    "segments of numbers": ({"segments": [1]}, "a number instead of a dict"),
    "traces that are a dict": ({"device_traces": {"a": 1}}, "one history per device"),
    "a history of lists": (snapshot((), [[]]), "a list instead of a dict"),
    "a size that is a text": (snapshot((), [entry("alloc", 0, "x")] * 2), "a text instead of a whole number"),  # type: ignore[arg-type]
    "a size below 0": (snapshot((), [entry("alloc", 0, -5)] * 2), "-5, which is below 0"),
    "a size beyond 63 bits": (snapshot((), [entry("alloc", 0, 2**63)] * 2), "more than 63 bits"),
    "sizes that sum beyond 62 bits": (snapshot((), [entry("alloc", 0, 2**62)] * 4), "sum to more than 62 bits"),
    "a device that is none": (snapshot([segment(0, block(1), device=-1)]), "names no device"),
    "blocks that are a number": (snapshot([{**segment(0), "blocks": 7}]), "must be a list, not a number"),
    "a block without a number": (
        snapshot([segment(0, block(1, requested_size=None))]),
        "nothing instead of a whole number",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    """Plain containers that are not a snapshot are refused with the place of the error."""
    content, words = BROKEN[name]
    with pytest.raises(BadInputError) as refused:
        import_file(write(tmp_path / "broken.pickle", content))
    assert words in str(refused.value)
    assert str(tmp_path / "broken.pickle") in str(refused.value)


FOREIGN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "blank": (b" \n", "is empty"),
    "a zip": (b"PK\x03\x04data.pkl", "such as torch.save writes"),
    "a trace": (b"PK\x03\x04....manifest.json", "already a memprof recording"),
    "text": (b"hello", "neither a memory snapshot"),
    "a page": (b"<html></html>", "without a memory snapshot in it"),
    "a page with no base64": (b'<html>"base64": "a"', "is not base64"),
    "half a gzip": (gzip.compress(b"x" * 1000)[:20], "no end"),
    "no gzip": (b"\x1f\x8bxxxxxxxxxxxx", "damaged"),
    "a gzip bomb": (gzip.compress(bytes(30 << 20), 9) * 10, "no trace does"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_files_are_told_apart(name: str, tmp_path: Path) -> None:
    """Files of other kinds say what they are; a gzip bomb is given up long before it is unpacked."""
    data, words = FOREIGN[name]
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(BadInputError, match=words):
        import_file(tmp_path / "file")


def test_missing_files_and_folders_are_told_apart(tmp_path: Path) -> None:
    """No such file, and a folder, are sentences of their own."""
    with pytest.raises(BadInputError, match="no file"):
        import_file(tmp_path / "none.pickle")
    with pytest.raises(BadInputError, match="is a folder"):
        import_file(tmp_path)


def test_names_cannot_break_the_stacks(tmp_path: Path) -> None:
    """A file or function with line breaks in its name stays one frame."""
    strange = [{"filename": "a\nb.py", "name": "f\r\ng", "line": 1}, {"filename": 7, "name": None, "line": "x"}, 5]
    trace = imported(tmp_path, snapshot((), [entry("alloc", 0, 512, strange), entry("alloc", 9, 512, BACKWARD)]))
    assert trace.table(Stacks).frames[0].splitlines()[0] == "a b.py:1:f g"
    assert np.all(trace.table(Ops).name != "")
