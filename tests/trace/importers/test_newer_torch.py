"""What torch 2.14 and 2.15 add to a snapshot: pinned host memory, annotations of tensors, metadata of both kinds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from memprof.analysis.report.report import build_report
from memprof.analysis.report.table_rows import find_largest
from memprof.cli.main import main
from memprof.errors import UsageError
from memprof.trace.importers.device import HOST
from memprof.trace.importers.importing import import_file
from memprof.trace.importers.metadata import noted_phases
from memprof.trace.importers.snapshot_events import KEYS
from memprof.trace.schema import ACTIONS, NONE, AllocatorEvents, Stacks, Storages
from memprof.trace.store import Trace, write_trace
from tests.trace.importers.writing import FORWARD, MIB, block, entry, frame, freed, segment, small_job, snapshot, write

PINNED = [frame("/job/data.py:7", "pin")]
BASE = 1 << 40


def pinned() -> dict[str, Any]:
    """Pinned memory: 3 MiB requested and held to the end, and 5 MiB that come and go, in blocks of 4 and 8 MiB."""
    return {
        "host_segments": [
            segment(BASE, block(4 * MIB, requested_size=3 * MIB, frames=PINNED), device=-1),
            segment(BASE + 64 * MIB, block(8 * MIB, "inactive", requested_size=0), device=-1),
        ],
        "host_traces": [
            entry("segment_alloc", BASE, 4 * MIB, time_us=1001),
            entry("alloc", BASE, 3 * MIB, PINNED, time_us=1002),
            entry("segment_alloc", BASE + 64 * MIB, 8 * MIB, time_us=1003),
            entry("alloc", BASE + 64 * MIB, 5 * MIB, PINNED, time_us=1004),
            *freed(BASE + 64 * MIB, 5 * MIB, time_us=1005),
        ],
    }


def opened(tmp_path: Path, content: Any, device: int | None = None) -> Trace:
    """Imports a snapshot and opens the recording."""
    path = tmp_path / f"{device}.memprof"
    write_trace(path, import_file(write(tmp_path / "snapshot.pickle", content), device).ranks)
    return Trace.open(path)


def test_pinned_memory_is_a_device_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its figures are beside those of the card, whose recording names its line, and it can be imported itself."""
    content = small_job() | pinned()
    result = import_file(write(tmp_path / "snapshot.pickle", content))
    card, host = result.devices
    assert (card["device"], host["device"]) == ("cuda:0", "host")
    assert len(result.ranks) == 1
    words = "pinned host memory: peak 12.00 MiB in use for 8.00 MiB requested, 12.00 MiB reserved"
    assert f"{words}; at the end /job/data.py:7:pin 4.00 MiB" in result.ranks[0][0].notes[-1]
    assert words in result.remarks[-1]
    assert "--only host" in result.remarks[-1]
    trace = opened(tmp_path, content, HOST)
    assert trace.manifest.machine.device_name == "pinned host memory"
    assert trace.table(Storages).device.tolist() == ["cpu", "cpu"]
    assert trace.table(Storages).requested_bytes.tolist() == [3 * MIB, 5 * MIB]
    assert trace.table(Storages).allocated_bytes.tolist() == [4 * MIB, 8 * MIB]
    report = build_report(trace)
    assert report.at_peak.moment.allocated_bytes == 12 * MIB
    assert report.reserved_bytes == 12 * MIB
    assert main(["report", str(trace.path), "--allocator"]) == 2
    assert "blocks are never split" in capsys.readouterr().err
    assert [part.key and part.key.place for part in report.at_peak.by_source.parts] == ["data.py:7"]


def test_a_file_of_pinned_memory_alone_is_imported_as_such(tmp_path: Path) -> None:
    """With record_cuda=False no device is recorded, just the host, and --only rejects anything else."""
    content = snapshot((), [], **pinned())
    assert opened(tmp_path, content).manifest.rank == 0
    assert [one["device"] for one in import_file(tmp_path / "snapshot.pickle").devices] == ["host"]
    with pytest.raises(UsageError, match="holds nothing of device 0; it has host"):
        import_file(tmp_path / "snapshot.pickle", 0)
    with pytest.raises(UsageError, match="holds nothing of the host; it has 0"):
        import_file(write(tmp_path / "card.pickle", small_job()), HOST)


def test_pinned_blocks_that_are_gone_have_the_size_of_their_segment(tmp_path: Path) -> None:
    """A block is a segment, so that the rounding of what is gone shows; without one, it is the power of two."""
    history = [
        *(entry("segment_alloc", BASE, 8 * MIB), entry("alloc", BASE, 5 * MIB), *freed(BASE, 5 * MIB)),
        *(entry("segment_free", BASE, 8 * MIB), entry("segment_alloc", BASE, 6 * MIB), entry("alloc", BASE, 6 * MIB)),
        *(*freed(BASE, 6 * MIB), entry("segment_free", BASE, 6 * MIB)),
        *freed(BASE + 64 * MIB, 3 * MIB),
    ]
    storages = opened(tmp_path, {"host_segments": [], "host_traces": history, "segments": []}).table(Storages)
    assert storages.allocated_bytes.tolist() == [4 * MIB, 8 * MIB, 6 * MIB]
    assert storages.created_op_id.tolist() == [NONE, 1, 2]


def test_sizes_of_blocks_alone_are_said_to_be_that(tmp_path: Path) -> None:
    """Where the file has no requested sizes of pinned blocks, a note says that less may have been requested."""
    whole = {"host_segments": [segment(BASE, block(4 * MIB), device=-1)], "segments": []}
    history = [entry("segment_alloc", BASE, 4 * MIB), entry("alloc", BASE, 4 * MIB)]
    assert "less may have been requested" in opened(tmp_path, {**whole, "host_traces": history}).manifest.notes[-1]


def noted_job() -> dict[str, Any]:
    """Two tensors at one address, one after the other, each with metadata; the first is annotated twice."""
    history = [
        entry("segment_alloc", 0, 4 * MIB, internal_metadata="mallocWithAddress"),
        entry("alloc", 0, MIB, user_metadata='{"phase":"forward","layer":3}'),
        entry("annotate", 0, MIB, user_metadata="saved for backward"),
        entry("annotate", 0, MIB, user_metadata="h.3.out"),
        *freed(0, MIB),
        entry("alloc", 0, 2 * MIB, user_metadata={"phase": "rollout", "nested": [1]}),
        entry("annotate", 64 * MIB, MIB, user_metadata="of a block that is gone"),
    ]
    return snapshot([segment(0, block(2 * MIB), block(2 * MIB, "inactive"))], history)


def test_what_the_job_noted_is_in_columns_and_a_split(tmp_path: Path) -> None:
    """Metadata, annotations of the tensor that lived at the address then, and the allocator's own remarks are kept."""
    trace = opened(tmp_path, noted_job())
    events = trace.table(AllocatorEvents)
    assert events.action.tolist().count("annotate") == 3
    assert events.internal_metadata[0] == "mallocWithAddress"
    assert events.user_metadata[-2] == '{"phase":"rollout"}'
    noted = ['{"phase":"forward","layer":3}; saved for backward; h.3.out', '{"phase":"rollout"}']
    assert trace.table(Storages).metadata.tolist() == noted
    report = build_report(trace)
    assert [one.metadata for one in find_largest(report.shown.holding, report.sources, 9)] == noted[1:]
    split = report.at_peak.by_metadata
    assert [(part.key, part.bytes) for part in split.parts] == [(noted[1], 2 * MIB)]
    assert not any("left out" in note for note in trace.manifest.notes)


def test_metadata_names_phases(tmp_path: Path) -> None:
    """``{"phase": ...}`` is the phase of an allocation, and what is known of training's phases follows from it."""
    trace = opened(tmp_path, noted_job())
    assert trace.step(0).ops.phase.tolist() == ["other", "forward", "rollout"]
    assert trace.table(Storages).category.tolist()[0] == "temporary"
    odd = ['{"phase":7}', '{"phase":"no\\nname"}', "{", "[]", "phase", '{"phase":"peak"}']
    assert set(noted_phases(odd).tolist()) == {""}


def test_keys_that_are_new_are_named(tmp_path: Path) -> None:
    """A key that torch up to 2.15 does not write is left out, by name, wherever it is."""
    content = snapshot(
        [segment(0, block(MIB, color=1), weight=2)],
        [entry("alloc", 0, MIB, [{**frame("/job/a.py:1", "f"), "column": 3}], backward_frames=["f"])],
        extra=[],
    )
    notes = " ".join(opened(tmp_path, content).manifest.notes)
    assert "keys unknown to this version were left out: backward_frames, color, column, extra, weight." in notes


def test_memory_of_backward_has_the_line_of_its_forward(tmp_path: Path) -> None:
    """In anomaly mode, torch notes the forward's traceback as texts: its line is shown, the phase is backward."""
    texts = [
        '  File "/job/train.py", line 9, in main\n    loss = model(x)\n',
        '  File "/job/model.py", line 3, in forward\n    return x.exp()\n',
    ]
    native = [{"filename": "??", "line": 0, "name": "at::_ops::mul_Tensor::call(at::Tensor const&)"}]
    history = [
        entry("alloc", 0, MIB, FORWARD),
        entry("alloc", MIB, 2 * MIB, native, forward_frames=texts),
        entry("alloc", 3 * MIB, MIB, native, forward_frames=[7, "no traceback"]),
    ]
    end = segment(0, *(block(size * MIB, frames=native, forward_frames=texts) for size in (1, 2, 1)))
    trace = opened(tmp_path, snapshot([end], history))
    ops = trace.step(0).ops
    assert ops.phase.tolist() == ["other", "forward", "backward", "other"]
    assert trace.table(Stacks).frames[ops.stack_id[2]] == "/job/model.py:3:forward\n/job/train.py:9:main"
    assert ops.stack_id[3] == NONE
    split = build_report(trace).at_peak.by_source
    assert [(part.key and part.key.place, part.bytes) for part in split.parts] == [
        ("model.py:3", 3 * MIB),
        (None, MIB),
    ]
    assert not any("left out" in note for note in trace.manifest.notes)
    state = opened(tmp_path, snapshot([end]), device=0)  # without a history, blocks have it
    assert {part.key and part.key.place for part in build_report(state).at_peak.by_source.parts} == {"model.py:3"}


def test_options_set_by_the_program_are_read(tmp_path: Path) -> None:
    """Without the environment's text, the settings in force are the options that set them."""
    settings = {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_round_threshold": 256 * MIB,
        "max_cached_size": 2**63 - 1,  # torch's default: no limit
        "pinned_use_cuda_host_register": True,
        "pinned_num_register_threads": 4,
        "roundup_power2_divisions": {"1": 0, "512": 4},
    }
    manifest = opened(tmp_path, small_job() | {"allocator_settings": settings}).manifest
    assert manifest.machine.allocator_settings == (
        "pinned_use_cuda_host_register:True,pinned_max_round_threshold_mb:256,pinned_num_register_threads:4,"
        "roundup_power2_divisions:[512:4]"
    )


def test_every_key_and_action_that_torch_documents_is_known() -> None:
    """The schema in the docstring of the installed torch has no key and no action that is not read here."""
    memory = pytest.importorskip("torch.cuda.memory")
    classes = re.split(r"class (\w+)\(TypedDict\)", memory._snapshot.__doc__)[1:]
    documented = {
        name: set(re.findall(r"^ {12}(\w+):", body, re.MULTILINE))
        for name, body in zip(classes[::2], classes[1::2], strict=True)
    }
    ours = {
        "Snapshot": "snapshot",
        "Segment": "segments",
        "Block": "blocks",
        "Frame": "frames",
        "TraceEntry": "entries",
    }
    actions = re.search(r"action: Literal\[(.*?)\n {12}\]", memory._snapshot.__doc__, re.DOTALL)
    assert actions
    assert set(re.findall(r'^ +"(\w+)"', actions[1], re.MULTILINE)) <= {*ACTIONS}
    assert documented.keys() == ours.keys()
    assert {name: keys - KEYS[ours[name]] for name, keys in documented.items()} == {name: set() for name in ours}
