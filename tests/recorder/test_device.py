"""What the recorder reads from a device, and backward in a thread of the engine's own."""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memprof.recorder.device_history import block_rows, fresh_entries, history_rows, segment_records
from memprof.recorder.device_sampling import Devices, Driver, ProcessInfo, bytes_of, driver_version
from memprof.recorder.machine import describe_place, find_rank
from memprof.recorder.memory.live_objects import OutsideWatch
from memprof.recorder.profiler.sources import MemorySources
from memprof.recorder.profiler.timing import device_time_ns
from memprof.trace.importers.pickles.safe_pickle import load_plain
from memprof.trace.importers.snapshot import read_snapshot
from memprof.trace.importers.sniff import read_input
from memprof.trace.schema import ACTIONS
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.recorder.conftest import Logged

_FOLDER = Path(__file__).parents[2].parent / "shared" / "data" / "snapshots"


_FILES = sorted(_FOLDER.glob("*.pickle"))


@pytest.mark.skipif(not _FILES, reason="the folder of snapshots recorded by others is not there")
@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem[:40])
def test_snapshots_of_others_are_read_in_full(path: Path) -> None:
    """Entries by action, blocks in use and segments are those that the importer, which is tested apart, finds."""
    loaded: Any = load_plain(read_input(path)[1])
    segments = loaded if isinstance(loaded, list) else loaded["segments"]
    traces = [] if isinstance(loaded, list) else loaded.get("device_traces", [])
    for facts in (device.facts for device in read_snapshot(path).devices):
        number = int(facts.device.partition(":")[2])
        pools: dict[tuple[int, int], int] = {}
        rows = list(history_rows(traces[number] if number < len(traces) else [], number, pools))
        assert Counter(ACTIONS[row[2]] for row in rows) == facts.actions
        assert {row[1] for row in rows} <= {number}
        own = [segment for segment in segments if segment.get("device", 0) == number]
        if any("address" not in block for segment in own for block in segment["blocks"]) or not own:
            continue  # of a torch older than any that memprof records
        blocks = [block for block in block_rows(own) if block[0] == number]
        assert sum(block[2] for block in blocks) == facts.end_active_bytes
        assert sum(block[2] for block in blocks if not block[5]) == facts.end_allocated_bytes
        assert sum(block[3] for block in blocks if not block[5]) == facts.end_requested_bytes
        records = segment_records(own)
        assert len(records) == facts.segments
        assert sum(record["total_size"] for record in records) == facts.end_reserved_bytes
        json.dumps(records)


def test_pools_are_numbered_as_they_are_met() -> None:
    """The default pool is 0, whichever comes first."""
    pools: dict[tuple[int, int], int] = {}
    entries = [
        {"action": "alloc", "addr": 8, "size": 4, "stream": 0, "time_us": 7, "pool_id": (2, 1)},
        {"action": "free_requested", "addr": 8, "size": 4, "stream": 0, "time_us": 8, "pool_id": (0, 0)},
        {"action": "oom", "device_free": 11, "size": 4, "stream": 0, "time_us": 9},
        {"action": "something new", "addr": 1},
    ]
    assert list(history_rows(entries, 1, pools)) == [
        (7, 1, ACTIONS.index("alloc"), 8, 4, 0, 1),
        (8, 1, ACTIONS.index("free_requested"), 8, 4, 0, 0),
        (9, 1, ACTIONS.index("oom"), 11, 4, 0, 0),
    ]


def test_entries_are_logged_once() -> None:
    """What was seen last is found again in a history that only keeps its latest entries, or all is new."""
    entries = [{"action": "alloc", "addr": place, "size": 8, "time_us": place // 2} for place in range(9)]
    last = ("alloc", 5, 8, 2)
    assert fresh_entries(entries, None) == entries
    assert fresh_entries(entries, last) == entries[6:]
    assert fresh_entries(entries[4:], last) == entries[6:]
    assert fresh_entries(entries[6:], last) == entries[6:]
    assert fresh_entries([], last) == []


def test_the_memory_of_one_process_is_found() -> None:
    """Of several processes, and of one that is listed twice; unknown where the driver does not report it."""
    processes = [ProcessInfo(7, 100, 0, 0), ProcessInfo(8, 2**64 - 1, 0, 0), ProcessInfo(7, 20, 0, 0)]
    assert bytes_of(processes, 7) == 120
    assert bytes_of(processes, 8) == -1
    assert bytes_of(processes, 9) == -1
    # As the header lays it out on 64 bits: a number of 4 bytes, 4 to align, 8 bytes, and two numbers of 4.
    assert ctypes.sizeof(ProcessInfo) == 24
    raw = (9).to_bytes(4, "little") + bytes(4) + (2**40).to_bytes(8, "little") + bytes(8)
    assert bytes_of([ProcessInfo.from_buffer_copy(raw)], 9) == 2**40


def test_without_the_library_nothing_is_told() -> None:
    """A machine without NVIDIA's driver has no NVML."""
    if ctypes.util.find_library("nvidia-ml"):
        pytest.skip("this machine has NVIDIA's driver")
    assert Driver().process_bytes("GPU-0") == -1


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("GCC version: 12.3.0", ""),
    ],
)
def test_driver_version(text: str, version: str) -> None:
    """Of the closed and of the open kernel module."""
    assert driver_version(text) == version


def test_work_on_a_device_is_charged_to_the_operator_that_started_it() -> None:
    """Events of the CPU, and those without a launching operator, are attributed to no operator."""

    def event(kind: str, linked: int, duration_ns: int) -> SimpleNamespace:
        return SimpleNamespace(
            device_type=lambda: SimpleNamespace(name=kind),
            linked_correlation_id=lambda: linked,
            duration_ns=lambda: duration_ns,
        )

    events = [event("CUDA", 3, 40), event("CUDA", 3, 2), event("CPU", 3, 900), event("CUDA", 0, 5), event("CUDA", 4, 1)]
    assert device_time_ns(SimpleNamespace(events=lambda: events)) == {3: 42, 4: 1}


def test_a_processor_alone_has_no_devices(log: Logged) -> None:
    """Nothing is sampled, described or started, and CUDA is not set up by asking."""
    import torch

    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has a device")
    Devices(log).sample()
    sources = MemorySources(log, OutsideWatch(log), has_native_events=True)
    sources.start()
    assert sources._is_native
    assert sources.on_output is None
    assert sources.remember is None
    sources.stop()
    assert not log.rows("device_memory")
    assert not log.rows("device_alive")


_JOB = Path(__file__).parent / "jobs" / "far_device.py"


#: What the job printed under some arguments, and a step.
Recorded = Callable[..., tuple[bytes, Step]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Records the job with some arguments, once; returns what it printed, and a step."""
    return cache(lambda *arguments: _recorded(tmp_path_factory.mktemp("job"), *arguments))


def _recorded(folder: Path, *arguments: str) -> tuple[bytes, Step]:
    output = folder / "run.memprof"
    command = [sys.executable, "-m", "memprof.cli.main", "record", "-q", "-o", str(output), str(_JOB), *arguments]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stderr == b""
    trace = Trace.open(output)
    assert trace.recorded_steps == (2, 3, 4)
    step = trace.steady_step()
    step.check()
    return done.stdout, step


def by_name(step: Step) -> list[tuple[str, str, str, int]]:
    """Returns module, name, phase and forward operator of each operator."""
    modules = [*step.modules.name.tolist(), "-"]
    ops = step.ops
    return [
        (modules[module], name, phase, forward)
        for module, name, phase, forward in zip(
            ops.module_id.tolist(), ops.name.tolist(), ops.phase.tolist(), ops.forward_op_id.tolist(), strict=True
        )
    ]


@pytest.mark.parametrize(
    "arguments", [(), pytest.param(("checkpoint",), marks=pytest.mark.slow), ("checkpoint", "reentrant")]
)
def test_backward_in_a_thread_of_its_own_is_recorded(recorded: Recorded, arguments: tuple[str, ...]) -> None:
    """Operators of the device's thread have their phase, their module and the forward operator they belong to."""
    plain = subprocess.run([sys.executable, str(_JOB), *arguments], capture_output=True, check=True)
    stdout, step = recorded(*arguments)
    assert stdout == plain.stdout
    rows = by_name(step)
    again = recomputed(step)
    for module in ("square", "again"):
        forward = {i for i, row in enumerate(rows) if row[0] == module and row[2] == "forward"}
        backward = [
            row[3]
            for i, row in enumerate(rows)
            if row[0] == module and row[2] == "backward" and row[1] == "aten.mul.Tensor" and i not in again
        ]
        assert len(backward) == 2
        assert set(backward) <= forward | again


def recomputed(step: Step) -> set[int]:
    """Returns the operators that run again."""
    return {int(row) for row in step.ops.op_id[step.ops.is_recompute]}


def test_recomputation_on_a_device_is_told(recorded: Recorded) -> None:
    """What a reentrant checkpoint runs again in the device's thread is marked, and its own backward belongs to it."""
    _, step = recorded("checkpoint", "reentrant")
    again = recomputed(step)
    assert [step.ops.name[row] for row in sorted(again)] == ["aten.mul.Tensor"]
    rows = by_name(step)
    assert [rows[row][0] for row in again] == ["again"]
    assert [row[1] for row in rows if row[3] in again] == ["aten.mul.Tensor", "aten.mul.Tensor", "aten.add.Tensor"]
    calls = step.module_calls
    assert calls.is_recompute.tolist().count(True) == 1


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, (1, 2)),
        ({"RANK": "2"}, (2, 3)),
        ({"RANK": "8", "WORLD_SIZE": "4"}, (8, 9)),
        ({"RANK": "x", "WORLD_SIZE": "2"}, (0, 1)),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, (0, 1)),
    ],
)
def test_rank_is_told_by_whatever_started_the_process(environment: dict[str, str], told: tuple[int, int]) -> None:
    """torchrun's variables win over those of its launcher; a single batch task and malformed values give no rank."""
    assert find_rank(environment) == told


def test_place_names_the_machine_and_its_clock() -> None:
    """Two looks from one machine name the same clock."""
    assert describe_place() == describe_place()
    assert describe_place()["node"]
    assert describe_place()["clock"]
