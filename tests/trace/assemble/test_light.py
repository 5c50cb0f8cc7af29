"""A light recording of a job on CUDA is packed from its snapshot: the history's bytes, the run's steps and modules."""

from __future__ import annotations

import shutil
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memprof.replay.live import live_bytes
from memprof.trace.assemble.describe import JobRecords
from memprof.trace.assemble.light.process import assemble_light
from memprof.trace.assemble.light.stretch import BETWEEN_CALLS, BETWEEN_NODES, UPDATE, cut_regions, ordinary_spool
from memprof.trace.files.spool import (
    BACKWARD,
    COLUMNS,
    FORWARD,
    LIGHT_FOLDER,
    OPTIMIZER,
    OTHER,
    SNAPSHOT_AT_END,
    Spool,
)
from memprof.trace.files.spool_writer import SpoolWriter
from memprof.trace.importers.snapshot import read_snapshot
from memprof.trace.schema import NONE, Ops, StepPeaks, Steps
from memprof.trace.store import Trace
from tests.replay.allocator.snapshots import snapshot_paths

PATHS = snapshot_paths()
_START: dict[str, Any] = {
    "memprof_version": "0",
    "torch_version": "2.13.0",
    "python_version": "3.11",
    "time_ns": 1,
    "pid": 1,
    "argv": ["train.py"],
    "rank": 0,
    "world_size": 1,
    "machine": {"device_name": "", "device_kind": "cpu", "cores": 1, "memory_bytes": 1, "os": ""},
}


def _write_process(folder: Path, snapshot: Path, starts_ns: list[int], module_ns: int) -> None:
    """Writes the folder of a process that followed a run of steps and called one module."""
    writer = SpoolWriter(folder / LIGHT_FOLDER)
    writer.write_record("start", _START)
    writer.write_record("modules", [[0, "", "GPT", -1, 100], [0, "head", "Linear", 0, 100]])
    ends = [*starts_ns[1:], starts_ns[-1] + 10**6]
    for step, (start, end) in enumerate(zip(starts_ns, ends, strict=True), start=40):
        row = [step, start, end, 1, 1, BACKWARD, 1, 1000 * step, 2000 * step, 2, OTHER, -1, 9, 64]
        writer.write_rows("step_peaks", array("q", row))
    writer.write_rows("module_peaks", array("q", [FORWARD, 1, 40, 10, FORWARD, 1, 41, 30, BACKWARD, 1, 40, 20]))
    writer.write_record("end", {"reason": "the job ended", "time_ns": ends[-1], "failed_at": None})
    writer.close()
    ring = SpoolWriter(folder / "ring-0")
    ring.write_rows("marks", array("q", [module_ns, 1, FORWARD, 0, 0]))
    ring.close()
    shutil.copyfile(snapshot, folder / LIGHT_FOLDER / SNAPSHOT_AT_END)


@pytest.mark.skipif(not PATHS, reason="the folder of real snapshots is not there")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem[:40])
def test_real_snapshots_are_packed_with_the_runs_steps(path: Path, tmp_path: Path) -> None:
    """Every byte of the history is there, step by step as the run's clock cuts it, with its module."""
    devices = read_snapshot(path).devices
    device = max(devices, key=lambda one: (one.facts.peak_requested_bytes, -one.number))
    times = device.entries.time_us[~np.isnan(device.entries.time_us)]
    if not device.facts.has_timeline or not len(times):
        starts_ns, module_ns = [10**9, 2 * 10**9], 10**9
    else:
        low, high = float(times.min()), float(times.max())
        starts_ns = [round((low + (high - low) * part) * 1000) for part in (0.0, 0.4, 0.7)]
        module_ns = starts_ns[0]
    _write_process(tmp_path / "process-1", path, starts_ns, module_ns)
    packed = assemble_light(JobRecords(tmp_path / "process-1", {}, {"returncode": 0}))
    assert packed is not None
    manifest = packed[0]
    trace = Trace.of([packed], "run.memprof")
    assert manifest.backend.name == "cuda-light"
    assert manifest.machine.device_kind == "cuda"
    assert trace.table(StepPeaks).how.tolist() == ["told"] * len(starts_ns)
    assert set(trace.table(Steps).step.tolist()) >= set(range(40, 40 + len(starts_ns)))
    highest = 0
    for number in trace.recorded_steps:
        step = trace.step(number)
        step.check()
        highest = max(highest, int(live_bytes(step).during.max()))
    blocks = device.lives.allocated
    assert highest <= int(blocks.sum())
    assert highest >= device.facts.peak_requested_bytes or not device.facts.has_timeline
    if device.facts.has_timeline and len(times):
        modules = set(trace.table(Ops).module_id.tolist())
        assert modules <= {NONE, 1}


def test_a_killed_job_on_cuda_leaves_its_counts(tmp_path: Path) -> None:
    """Its history is gone with it; steps, their highest counts and the place where it ended are there."""
    writer = SpoolWriter(tmp_path / LIGHT_FOLDER)
    writer.write_record("start", _START)
    writer.write_record("counted_device", "cuda:3")
    writer.write_record(
        "device", {"device": "cuda:3", "kind": "cuda", "name": "RTX", "capacity_bytes": 24, "cuda": "13"}
    )
    writer.write_record("modules", [[0, "", "GPT", -1, 100], [0, "head", "Linear", 0, 100]])
    rows = [7, 0, 10**6, 1, 1, BACKWARD, -1, 500, 800, 2, OTHER, -1, 400, 64]
    rows += [8, 10**6, 15 * 10**5, 0, 0, FORWARD, 1, 300, 800, 0, FORWARD, 1, -1, 64]
    writer.write_rows("step_peaks", array("q", rows))
    writer.close()
    packed = assemble_light(JobRecords(tmp_path, {}, {"returncode": -9}))
    assert packed is not None
    trace = Trace.of([packed], "run.memprof")
    assert trace.manifest.backend.name == "cuda-light"
    machine = trace.manifest.machine
    assert (machine.device_kind, machine.device_name, machine.capacity_bytes, machine.memory_bytes) == (
        "cuda",
        "RTX",
        24,
        1,
    )
    assert trace.manifest.capture.ends_at == "step 8, forward of head"
    peaks = trace.table(StepPeaks)
    assert peaks.device.tolist() == ["cuda:3", "cuda:3"]
    assert (peaks.end_bytes.tolist(), peaks.input_elements.tolist()) == ([400, NONE], [64, 64])
    assert peaks.allocated_bytes.tolist() == [500, 300]
    assert peaks.how.tolist() == ["told", "counted"]
    assert trace.recorded_steps == ()
    assert trace.manifest.capture.reason == "the job was killed by SIGKILL"
    for exit_record, reason in (
        ({"returncode": 1}, "the job ended without leaving Python in order"),
        (None, "the job is still running"),
    ):
        packed = assemble_light(JobRecords(tmp_path, {}, exit_record))
        assert packed is not None
        assert packed[0].capture.reason == reason


def test_a_process_that_recorded_nothing_is_none(tmp_path: Path) -> None:
    """A job killed before its first step leaves no recording."""
    writer = SpoolWriter(tmp_path / LIGHT_FOLDER)
    writer.write_record("start", _START)
    writer.close()
    assert assemble_light(JobRecords(tmp_path, {}, None)) is None


def _stretch(**rows: list[list[int]]) -> Spool:
    return Spool(
        {name: np.array(rows.get(name, []), dtype=np.int64).reshape(-1, len(COLUMNS[name])) for name in COLUMNS}
    )


@pytest.mark.parametrize(("ended", "last"), [([], 7), ([7], 8), ([7, 8], 9)])
def test_a_stretch_cut_short_ends_in_the_step_after_the_last_whole_one(ended: list[int], last: int) -> None:
    """Without a whole step it is the one that the stretch began with."""
    marks = [[10 * time, -1, OTHER, -1, 0] for time in range(10)]
    ring, main = _stretch(marks=marks, events=[[95, 0, 0, 0]]), _stretch()
    main.records["start"] = [_START]
    ring.records["begin"] = [{"step": 7, "time_ns": 0}]
    ring.records["steps"] = [
        {"step": step, "start_ns": 30 * place, "end_ns": 30 * place + 29} for place, step in enumerate(ended)
    ]
    steps = ordinary_spool(main, ring).records["steps"]
    assert [(one["step"], one["is_complete"]) for one in steps] == [*((step, True) for step in ended), (last, False)]


def test_regions_are_module_calls_backward_nodes_and_what_lies_between() -> None:
    """A model of one layer: forward, loss, two nodes of backward of which the second is the layer's, an update."""
    spool = _stretch(
        marks=[
            [0, -1, OTHER, -1, 5],  # the step begins
            [10, 0, FORWARD, 0, 5],  # the layer is called; its nodes are 5 and 6
            [20, -1, FORWARD, -1, 7],  # the loss; its node is 7
            [60, -1, OPTIMIZER, -1, 8],
            [70, -1, OTHER, -1, 8],
        ],
        nodes=[[30, 35, 7, 0], [40, 50, 6, 1]],
    )
    found = cut_regions(spool, 80)
    assert [(one.start_ns, one.end_ns, one.phase, one.module) for one in found] == [
        (0, 10, OTHER, -1),
        (10, 20, FORWARD, 0),
        (20, 30, FORWARD, -1),
        (30, 35, BACKWARD, -1),
        (35, 40, BACKWARD, -1),
        (40, 50, BACKWARD, 0),
        (50, 60, OTHER, -1),
        (60, 70, OPTIMIZER, -1),
        (70, 80, OTHER, -1),
    ]
    names = [one.name(["LossBackward", "LayerBackward"], ["Layer"]) for one in found]
    assert names[1:6] == ["Layer.forward", BETWEEN_CALLS, "LossBackward", BETWEEN_NODES, "LayerBackward"]
    assert names[7] == UPDATE


def test_a_module_that_runs_again_inside_a_node_is_a_recompute() -> None:
    """Activation checkpointing: the layer's call lies inside the node, and the node goes on after it."""
    spool = _stretch(
        marks=[[0, 0, FORWARD, 0, 5], [10, -1, FORWARD, -1, 6], [22, 0, BACKWARD, 1, 6], [28, -1, BACKWARD, -1, 7]],
        nodes=[[20, 30, 5, 0]],
    )
    inside = [one for one in cut_regions(spool, 40) if 20 <= one.start_ns < 30]
    assert [(one.start_ns, one.module, one.is_recompute) for one in inside] == [
        (20, 0, False),
        (22, 0, True),
        (28, 0, False),
    ]
    assert all(one.phase == BACKWARD for one in inside)
