"""The whole report as data, and as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from memprof.analysis.host.host_processes import HostProcess, summarise_processes
from memprof.analysis.report.notes import write_notes
from memprof.analysis.report.report import build_report
from memprof.analysis.report.report_json import report_to_json
from memprof.analysis.report.table_rows import find_largest
from memprof.errors import BadInputError
from memprof.trace.manifest import Backend, Capture, Manifest
from memprof.trace.schema import NONE, HostMemory, Memory, Saved, Steps, Storages
from memprof.trace.store import Trace
from tests.building import Op, Storage, Tables, make_tables, make_trace
from tests.strategies import jobs


def trace_of(*ranks: tuple[Manifest, Tables]) -> Trace:
    return Trace.of(list(ranks), Path("run.memprof"))


def tables_with_peak(size: int) -> Tables:
    op = Op("aten.mm.default", makes=["a"], frees=["a"], reads=["w"], stack="/job/train.py:4:main")
    return make_tables([[op, op]], [Storage("w", 10, "parameter"), Storage("a", size)])


def notes_of(manifest: Manifest, tables: Tables, number: int = 0) -> list[tuple[str, bool]]:
    trace = trace_of((manifest, tables))
    return [(note.text, note.is_warning) for note in write_notes(manifest, trace.table(Steps), trace.step(number))]


def with_steps(tables: Tables, **columns: list[Any]) -> Tables:
    return {**tables, Steps: tables[Steps].replace(**{name: np.array(values) for name, values in columns.items()})}


def test_the_steady_step_is_reported_unless_another_is_asked_for(small_tables: Tables) -> None:
    """Both steps hold 100 + 40 + 30 + 40 bytes at most, in backward; the second is the steady one."""
    trace = trace_of((Manifest(), small_tables))
    report = build_report(trace)
    assert (report.step.number, report.at_peak.moment.allocated_bytes, report.at_peak.moment.op_id) == (1, 210, 1)
    assert build_report(trace, step_number=0).step.number == 0
    assert [(step.step, step.peak.allocated_bytes if step.peak else None) for step in report.steps] == [
        (0, 210),
        (1, 210),
    ]


def test_damage_of_a_step_that_is_not_shown_is_told() -> None:
    """Its peak would be wrong without a word: a storage is freed before the operator that saved it releases it."""
    tables = make_tables(
        [[Op(makes=["a"]), Op(), Op(frees=["a"])], [Op(makes=["b"])]], [Storage("a", 10), Storage("b", 20)]
    )
    tables[Saved] = Saved.of(storage_id=[0], forward_op_id=[0], released_op_id=[2])
    assert build_report(trace_of((Manifest(), tables))).step.number == 1
    tables[Storages] = tables[Storages].replace(freed_op_id=np.array([1, NONE]))
    with pytest.raises(BadInputError, match="step 0 is inconsistent: released row 0 is of a storage that is not alive"):
        build_report(trace_of((Manifest(), tables)))


def test_another_moment_is_shown_beside_the_peak(small_tables: Tables) -> None:
    """In the first operator 100 + 40 + 30 bytes are alive and 5 more inside it."""
    report = build_report(trace_of((Manifest(), small_tables)), op_id=0)
    assert report.at_moment is not None
    assert report.at_moment.moment.allocated_bytes == 175
    assert report.shown is report.at_moment
    assert report.at_peak.moment.allocated_bytes == 210


def test_a_trace_without_operators_is_refused() -> None:
    """There is nothing to report on."""
    with pytest.raises(BadInputError):
        build_report(trace_of((Manifest(), {})))


def test_the_rank_with_the_highest_peak_is_reported() -> None:
    """Of three ranks the second has the highest peak and is the default."""
    ranks = [(Manifest(rank=rank), tables_with_peak(size)) for rank, size in enumerate((100, 300, 200))]
    trace = trace_of(*ranks)
    report = build_report(trace)
    assert (report.rank, report.compared.worst, report.at_peak.moment.allocated_bytes) == (1, 1, 310)
    assert [one.peak_bytes for one in report.ranks] == [110, 310, 210]
    assert build_report(trace, rank=2).rank == 2


def test_a_rank_that_ran_no_step_does_not_hide_the_others() -> None:
    """It has no peak; the report is of the rank that has one."""
    report = build_report(trace_of((Manifest(rank=0), {}), (Manifest(rank=1), tables_with_peak(5))))
    assert [one.peak_bytes is None for one in report.ranks] == [True, False]
    assert report.rank == 1


def test_reserved_bytes_are_reported_where_the_allocator_has_them() -> None:
    """None on CPU, the highest of the step elsewhere."""
    tables = tables_with_peak(7)
    assert build_report(trace_of((Manifest(), tables))).reserved_bytes is None
    memory = tables[Memory].replace(reserved_bytes=np.array([2048, 4096]))
    assert build_report(trace_of((Manifest(), {**tables, Memory: memory}))).reserved_bytes == 4096


def test_the_largest_storages_are_described() -> None:
    """Largest first, the older of equals first; what was alive before the step has no age."""
    ops = [
        Op("aten.mm.default", module="", makes=["a"], reads=["w"], duration_us=2, stack="/job/train.py:4:main"),
        Op("aten.relu.default", makes=["b"], reads=["a"], duration_us=3),
        Op("aten.sum.default", reads=["b"], frees=["b"]),
    ]
    storages = [Storage("w", 9, "parameter", name="fc.weight"), Storage("a", 20, module="", shape="4x5")]
    storages.append(Storage("b", 20))
    report = build_report(make_trace([ops], storages), op_id=2)
    first, second, third = find_largest(report.shown.holding, report.sources, 5)
    assert (first.shape, first.op, first.age_ops, first.age_us, first.module_title) == (
        "4x5",
        "aten.mm.default",
        2,
        5.0,
        "Model",
    )
    assert first.source is not None
    assert first.source.place == "train.py:4"
    assert (second.created_op_id, second.freed_op_id, second.age_ops) == (1, 2, 1)
    assert (third.name, third.created_op_id, third.age_ops, third.op) == ("fc.weight", None, None, None)


def test_host_memory_is_each_processs_highest() -> None:
    """The trainer first, then workers by size; unknown private bytes are shown as unknown."""
    samples = HostMemory.of(
        time_us=[1.0, 1, 1, 2, 2],
        pid=[10, 11, 12, 10, 12],
        role=["trainer", "worker", "child", "trainer", "worker"],
        rss_bytes=[900, 300, 310, 1200, 305],
        private_bytes=[700, 100, -1, 600, -1],
    )
    assert summarise_processes(samples) == (
        HostProcess("trainer", 10, 1200, 700),
        HostProcess("worker", 12, 310, None),
        HostProcess("worker", 11, 300, 100),
    )
    assert summarise_processes(HostMemory.empty()) == ()


def test_an_incomplete_capture_is_a_warning() -> None:
    """It says where the recording ends and why."""
    capture = Capture(False, "step 3, backward of layers.31.mlp", "the job was killed", -9)
    (note,) = notes_of(Manifest(capture=capture), tables_with_peak(1))
    text = "the capture is incomplete: it ends in step 3, backward of layers.31.mlp (the job was killed, SIGKILL)."
    assert note == (text, True)


def test_a_warm_up_step_is_a_warning() -> None:
    """Its optimizer state is made in it."""
    (note,) = notes_of(Manifest(), with_steps(tables_with_peak(1), kind=["warm_up"]))
    assert note[1]
    assert "warm-up" in note[0]


def test_a_step_the_recording_ends_in_is_a_warning() -> None:
    """Its peak may still have been to come."""
    ((text, is_warning),) = notes_of(Manifest(), with_steps(tables_with_peak(1), is_complete=[False]))
    assert is_warning
    assert "incomplete" in text


def test_several_rounds_are_said() -> None:
    """With gradient accumulation, say, one step holds more than one forward and backward."""
    tables = with_steps(tables_with_peak(1), micro_batches=[4])
    assert notes_of(Manifest(), tables) == [("a step runs 4 rounds of forward and backward.", False)]


def test_blind_spots_are_one_line_each() -> None:
    """The backend's long explanation is cut after its first line; the recorder's own notes follow."""
    manifest = Manifest(backend=Backend("cpu-native", (), ("what libraries malloc.\nSuch as numpy.",)), notes=("n",))
    assert notes_of(manifest, tables_with_peak(1)) == [
        ("not seen by cpu-native: what libraries malloc", False),
        ("n", False),
    ]


def test_json_of_a_light_recording_holds_the_whole_run(small_tables: Tables) -> None:
    """What is known of the run is under one key, which other recordings do not have."""
    report = build_report(trace_of((Manifest(), small_tables)))
    assert "run" not in report_to_json(report, largest=1)
    assert report_to_json(dataclasses.replace(report, run={"steps": 3}), largest=1)["run"] == {"steps": 3}


def test_json_keeps_its_promised_keys(small_tables: Tables) -> None:
    """The keys of design/cli.md, with raw bytes."""
    result = report_to_json(build_report(trace_of((Manifest(), small_tables))), largest=2)
    assert result["schema"] == 1
    assert result["complete"] is True
    assert result["peak"] == {
        "step": 1,
        "op_id": 1,
        "phase": "backward",
        "op": "aten.mm.default",
        "module": "fc",
        "source": None,
        "file": None,
        "line": None,
        "function": None,
        "allocated_bytes": 210,
        "reserved_bytes": None,
    }
    assert result["at_peak"]["by_category"] == {"input": 100, "gradient": 40, "parameter": 40, "activation": 30}
    assert result["steps"][0] == {
        "step": 0,
        "kind": "recorded",
        "complete": True,
        "duration_us": 1000.0,
        "peak_allocated_bytes": 210,
        "peak_phase": "backward",
        "peak_op_id": 1,
    }
    assert result["saved"]["by_module"][0] == {
        "module": "fc",
        "type": "Linear",
        "bytes": 100,
        "with_children_bytes": 100,
        "storages": 1,
    }
    assert result["phases"]["forward"]["allocated_bytes"] == 175
    assert result["categories"]["workspace"] == {"maximum_bytes": 5, "op_id": 0}
    assert len(result["at_peak"]["largest_storages"]) == 2
    assert not {"ranks", "worst_rank", "moment", "at_moment"} & set(result)


def test_json_of_another_moment_and_of_ranks() -> None:
    """Both add keys and change none."""
    trace = trace_of((Manifest(rank=0), tables_with_peak(1)), (Manifest(rank=1), tables_with_peak(2)))
    result = report_to_json(build_report(trace, op_id=0), largest=1)
    assert result["moment"]["op_id"] == 0
    assert result["at_moment"]["allocated_bytes"] == 12
    assert result["worst_rank"] == 1
    first = result["ranks"][0]
    assert (first["rank"], first["node"], first["device"]) == (0, None, "cpu")
    assert (first["peak_allocated_bytes"], first["peak_phase"], first["step_time_us"]) == (11, "forward", 1000.0)


def test_json_has_no_nan() -> None:
    """Unknown durations are null, as JSON has no NaN."""
    tables = with_steps(tables_with_peak(1), duration_us=[float("nan")])
    result = report_to_json(build_report(trace_of((Manifest(), tables))), largest=1)
    assert result["step_time_us"] is None
    json.dumps(result, allow_nan=False)


@given(jobs(max_steps=1))
def test_every_list_of_the_json_sums_to_the_peak(job: tuple[list[list[Op]], list[Storage]]) -> None:
    """Category, module, operator, line, stack and phase of a random job, after a round trip through text."""
    report = build_report(trace_of((Manifest(), make_tables(*job))))
    result = json.loads(json.dumps(report_to_json(report, largest=3), allow_nan=False))
    peak, split = result["peak"]["allocated_bytes"], result["at_peak"]
    assert sum(split["by_category"].values()) == peak
    for key in ("by_module", "by_op", "by_source", "by_stack", "by_phase"):
        assert sum(row["bytes"] for row in split[key]) == peak, key
    assert sum(row["bytes"] for row in result["saved"]["by_module"]) == result["saved"]["total_bytes"]
