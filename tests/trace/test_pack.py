"""From a job's spool to a trace."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from memprof.errors import BadInputError, MemprofError
from memprof.trace.files.pack import pack_spool
from memprof.trace.files.spool import COLUMNS, FILE_NAME
from memprof.trace.files.spool_folder import is_spool_folder, read_spool_folder
from memprof.trace.files.spool_writer import SpoolWriter
from memprof.trace.manifest import Capture, Machine, Manifest
from memprof.trace.schema import NONE, HostLimits, HostMemory, Ops
from memprof.trace.store import Trace
from tests.building import Tables

LAUNCH = {"command": ["python", "train.py"], "target": "train.py", "parent_pid": 1}
EXIT = {"returncode": 0, "ended_us": 9.0}


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """A spool of two processes, 11 and 12, with host memory of these and of a worker, 13."""
    folder = tmp_path / "run.memprof.spool"
    for pid in (12, 11):
        (folder / f"process-{pid}").mkdir(parents=True)
        (folder / f"process-{pid}" / FILE_NAME).touch()
        os.utime(folder / f"process-{pid}", (0, 0))  # before any process of this machine that may have these ids
    (folder / "launch.json").write_text(json.dumps(LAUNCH))
    (folder / "exit.json").write_text(json.dumps(EXIT))
    samples = [
        {"time_us": 1.0, "pid": 11, "role": "trainer", "rss_bytes": 100, "private_bytes": 60},
        {"time_us": 1.5, "pid": 12, "role": "trainer", "rss_bytes": 200, "private_bytes": None},
        {"time_us": 2.0, "pid": 13, "role": "worker", "rss_bytes": 300},
    ]
    lines = "".join(json.dumps(sample) + "\n" for sample in samples)
    (folder / "host.jsonl").write_text(lines + '{"time_us": 3.0, "pid": 1')
    return folder


class Assembler:
    """Gives every process folder the same tables; stands in for reading the raw recording."""

    def __init__(self, tables: Tables, ranks: dict[int, Manifest]) -> None:
        self.tables = tables
        self.ranks = ranks
        self.seen: list[tuple[dict[str, Any], dict[str, Any] | None]] = []

    def __call__(
        self, folder: Path, launch: dict[str, Any], ended: dict[str, Any] | None
    ) -> list[tuple[Manifest, Tables]]:
        self.seen.append((launch, ended))
        pid = int(folder.name.removeprefix("process-"))
        return [(dataclasses.replace(self.ranks[pid], pid=pid), dict(self.tables))] if pid in self.ranks else []


def test_further_devices_of_a_process_stand_behind_all_processes(spool: Path, small_tables: Tables) -> None:
    """Ranks of processes stay; what a process did on a second device is a rank more."""

    def assemble(folder: Path, launch: Any, ended: Any) -> list[tuple[Manifest, Tables]]:
        pid = int(folder.name.removeprefix("process-"))
        devices = ("cuda:0", "cuda:1") if pid == 11 else ("cuda:2",)
        machines = [Machine(device_name=device) for device in devices]
        return [(Manifest(rank=pid - 11, pid=pid, machine=machine), dict(small_tables)) for machine in machines]

    ranks = read_spool_folder(spool, assemble)
    assert sorted((m.rank, m.machine.device_name) for m, _ in ranks) == [(0, "cuda:0"), (1, "cuda:2"), (2, "cuda:1")]
    assert sum(len(tables[HostMemory]) for _, tables in ranks) == 3


def test_processes_are_read_by_rank(spool: Path, small_tables: Tables) -> None:
    """Each process is assembled with what the parent wrote, and they come in order of rank."""
    assemble = Assembler(small_tables, {11: Manifest(rank=1), 12: Manifest(rank=0)})
    ranks = read_spool_folder(spool, assemble)
    assert [(manifest.rank, manifest.pid) for manifest, _ in ranks] == [(0, 12), (1, 11)]
    assert assemble.seen == [(LAUNCH, EXIT), (LAUNCH, EXIT)]
    assert len(ranks[1][1][Ops]) == 6


def test_processes_of_equal_rank_are_numbered_by_start(spool: Path, small_tables: Tables) -> None:
    """A job that starts two trainers without ranks gives rank 0 to the first one started."""
    assemble = Assembler(small_tables, {11: Manifest(created_us=8.0), 12: Manifest(created_us=7.0)})
    ranks = read_spool_folder(spool, assemble)
    assert [(manifest.rank, manifest.pid, len(manifest.notes)) for manifest, _ in ranks] == [(0, 12, 0), (1, 11, 1)]


def test_host_memory_is_shared_out(spool: Path, small_tables: Tables) -> None:
    """Each rank has its own process's samples, the first also the workers'; a torn last line is left out."""
    assemble = Assembler(small_tables, {11: Manifest(rank=0), 12: Manifest(rank=1)})
    (_, first), (_, second) = read_spool_folder(spool, assemble)
    host = first[HostMemory]
    assert isinstance(host, HostMemory)
    assert list(zip(host.pid.tolist(), host.role, host.rss_bytes.tolist(), strict=True)) == [
        (11, "trainer", 100),
        (13, "worker", 300),
    ]
    assert host.private_bytes.tolist() == [60, NONE]
    assert Trace.of([(Manifest(), second)], spool).table(HostMemory).pid.tolist() == [12]


def test_host_samples_that_fit_no_column_are_dropped(spool: Path, small_tables: Tables) -> None:
    """Infinities, and numbers of more than 63 bits, are no reason to lose the recording."""
    sample = '{"time_us": %s, "pid": 11, "role": "trainer", "rss_bytes": %s}\n'
    limit = '{"time_us": 1.0, "limit": "machine", "total_bytes": %s, "free_bytes": 1}\n'
    wrong = [("Infinity", "1"), ("NaN", "1"), ("1.0", "Infinity"), ("1.0", "9" * 19), ("1.0", "7")]
    lines = [*(sample % pair for pair in wrong), *(limit % size for size in ("9" * 30, "1e999", "5"))]
    (spool / "host.jsonl").write_text("".join(lines))
    ((_, tables),) = read_spool_folder(spool, Assembler(small_tables, {11: Manifest()}))
    host, limits = tables[HostMemory], tables[HostLimits]
    assert isinstance(host, HostMemory)
    assert isinstance(limits, HostLimits)
    assert host.rss_bytes.tolist() == [7]
    assert limits.total_bytes.tolist() == [5]


def test_a_spool_without_host_samples_is_read(spool: Path, small_tables: Tables) -> None:
    """A job too short to be sampled has no host memory, and is read all the same."""
    (spool / "host.jsonl").unlink()
    ((_, tables),) = read_spool_folder(spool, Assembler(small_tables, {11: Manifest()}))
    assert len(tables[HostMemory]) == 0


def test_a_job_still_running_is_read(spool: Path, small_tables: Tables) -> None:
    """Without exit.json the processes are assembled with None in its place; with nothing where memprof is gone, too."""
    (spool / "exit.json").unlink()
    assemble = Assembler(small_tables, {11: Manifest()})
    read_spool_folder(spool, assemble)
    assert assemble.seen[-1] == (LAUNCH, {})
    running = {**LAUNCH, "parent_pid": os.getpid(), "started_us": time.time() * 1e6}
    (spool / "launch.json").write_text(json.dumps(running))
    read_spool_folder(spool, assemble)
    assert assemble.seen[-1] == (running, None)


def test_no_recorded_process_is_told(spool: Path, small_tables: Tables) -> None:
    """Where no process recorded anything the sentence says what became of the job."""
    with pytest.raises(BadInputError, match=r"holds no recording: python train\.py ended with status 0"):
        read_spool_folder(spool, Assembler(small_tables, {}))
    assert spool.is_dir()


def test_packing_writes_the_trace_and_removes_the_spool(spool: Path, small_tables: Tables) -> None:
    """The trace holds what the spool held, the spool is gone, and one line says what was packed."""
    output = spool.with_name("run.memprof")
    result = pack_spool(spool, output, Assembler(small_tables, {11: Manifest(rank=0), 12: Manifest(rank=1)}))
    assert not spool.exists()
    # Each rank: 2 steps of 3 operators, in each step y and g are taken and freed.
    assert (result.path, result.ranks, result.steps_recorded, result.events) == (output, (0, 1), 2, 16)
    assert result.message.startswith(f"{output}: 2 steps, 12 operators, 16 allocator events, 2 processes in ")
    trace = Trace.open(output)
    assert trace.ranks == (0, 1)
    trace.steady_step().check()


def test_packing_says_where_an_incomplete_recording_ends(spool: Path, small_tables: Tables) -> None:
    """The line names the place and the reason where the recording ends early."""
    capture = Capture(is_complete=False, ends_at="step 1, backward", reason="killed by signal 9")
    result = pack_spool(spool, spool.with_name("run.memprof"), Assembler(small_tables, {11: Manifest(capture=capture)}))
    assert result.message.endswith(" The recording ends early in step 1, backward: killed by signal 9.")


def test_a_trace_that_cannot_be_written_leaves_the_spool(spool: Path, small_tables: Tables) -> None:
    """When the output cannot be written the recording is kept, and the sentence says where."""
    output = spool.with_name("missing") / "run.memprof"
    with pytest.raises(MemprofError) as caught:
        pack_spool(spool, output, Assembler(small_tables, {11: Manifest()}))
    message = str(caught.value)
    assert message.startswith(
        f"{output} cannot be written (No such file or directory); the recording is safe in {spool}"
    )
    assert len(read_spool_folder(spool, Assembler(small_tables, {11: Manifest()}))) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write and remove everything")
def test_a_spool_that_cannot_be_removed_is_told(spool: Path, small_tables: Tables) -> None:
    """The trace is written and good even where its spool cannot be removed afterwards."""
    spool.chmod(0o500)
    result = pack_spool(spool, spool.with_name("run.memprof"), Assembler(small_tables, {11: Manifest()}))
    spool.chmod(0o700)
    assert "could not be removed" in result.message
    assert Trace.open(result.path).ranks == (0,)


def test_what_a_spool_is(spool: Path, tmp_path: Path) -> None:
    """A folder is a spool by what the parent or a process wrote in it."""
    assert is_spool_folder(spool)
    (spool / "launch.json").unlink()
    assert is_spool_folder(spool)
    assert not is_spool_folder(tmp_path)


def test_a_rank_that_cannot_be_packed_does_not_cost_the_others_theirs(spool: Path, small_tables: Tables) -> None:
    """The others are in the trace; the raw recordings stay, and the line says which rank and why."""
    whole = Assembler(small_tables, {11: Manifest(rank=0), 12: Manifest(rank=1)})

    def assemble(folder: Path, launch: Any, ended: Any) -> tuple[Manifest, Tables] | None:
        # Seen once to find the ranks, then to pack them.
        if folder.name == "process-11" and len(whole.seen) >= 2:
            raise ValueError("no such stream")
        return whole(folder, launch, ended)

    result = pack_spool(spool, spool.with_name("run.memprof"), assemble)
    assert result.ranks == (1,)
    assert result.remark == (
        f"Rank 0 could not be packed (ValueError: no such stream): the raw recordings stay in {spool}."
    )
    assert Trace.open(result.path).ranks == (1,)
    assert spool.is_dir()


def test_where_no_rank_can_be_packed_nothing_is_written(spool: Path, small_tables: Tables) -> None:
    """An error tells why, no file is left, and the raw recordings stay."""
    whole = Assembler(small_tables, {11: Manifest(rank=0), 12: Manifest(rank=1)})

    def assemble(folder: Path, launch: Any, ended: Any) -> tuple[Manifest, Tables] | None:
        if len(whole.seen) >= 2:
            raise ValueError("no such stream")
        return whole(folder, launch, ended)

    with pytest.raises(MemprofError, match=r"cannot be read \(ValueError: no such stream\). Its raw rows stay in"):
        pack_spool(spool, spool.with_name("run.memprof"), assemble)
    assert not spool.with_name("run.memprof").exists()
    assert spool.is_dir()


def test_ranks_are_assembled_one_at_a_time(spool: Path, small_tables: Tables) -> None:
    """Where the recordings tell their ranks, each process is assembled once, as it is written."""
    for pid, rank in ((11, 1), (12, 0)):
        (spool / f"process-{pid}" / FILE_NAME).unlink()
        writer = SpoolWriter(spool / f"process-{pid}")
        writer.write_record("start", {"rank": rank, "time_ns": pid, "pid": pid})
        writer.write_rows("operators", array("q", [0] * len(COLUMNS["operators"])))
        writer.close()
    assemble = Assembler(small_tables, {11: Manifest(rank=1), 12: Manifest(rank=0)})
    result = pack_spool(spool, spool.with_name("run.memprof"), assemble)
    assert (result.ranks, len(assemble.seen)) == ((0, 1), 2)
