"""Jobs of several processes, started in the usual ways: every rank records, and a crashed one leaves its part."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from memprof.analysis.ranks.rank_report import compare_ranks, job_notes
from memprof.analysis.ranks.stragglers import find_stragglers
from memprof.trace.schema import RankCollectives, Ranks
from memprof.trace.store import Trace

pytest.importorskip("torch")

JOB = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    if rank == int(os.environ.get("LATE", -1)):
        time.sleep(0.4)
    loss = model(torch.ones(8 * (rank + 1), 16)).pow(2).mean()
    loss.backward()
    if step == 3 and rank == int(os.environ.get("DIES", -1)):
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
os.write(1, f"rank {rank} of {dist.get_world_size()}: {loss.item():.6f}\\n".encode())
dist.destroy_process_group()
"""

SPAWNING = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model(torch.ones(4 * (rank + 1), 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, args=(int(os.environ["PORT"]),), nprocs=2)
"""

HANGING = """
import os, time
import torch
rank = int(os.environ["RANK"])
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 1 and step == 2:
        break
open(f"trained-{rank}", "w").close()
time.sleep(600)
"""

ALONE = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in (("ddp.py", JOB), ("spawning.py", SPAWNING), ("hanging.py", HANGING), ("alone.py", ALONE)):
        (tmp_path / name).write_text(text)
    return tmp_path


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def torchrun(ranks: int, *options: str) -> list[str]:
    chosen = options or ("--standalone",)
    return [sys.executable, "-m", "torch.distributed.run", *chosen, "--nproc-per-node", str(ranks), "ddp.py"]


def memprof(*words: str) -> list[str]:
    return [sys.executable, "-m", "memprof.cli.main", *words]


def run(command: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MEMPROF_")}
    environment = {**inherited, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


def record(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(memprof("record", "-o", "run.memprof", "--skip", "1", "--", *command), **variables)


def test_every_rank_records_and_the_job_is_as_ever(folder: Path) -> None:
    """The job prints and ends as it does by itself; each rank is there, named, and distinguished."""
    plain = run(torchrun(2))
    done = record(*torchrun(2), LATE="1")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, sorted(plain.stdout.splitlines()))
    assert "of ddp.py" not in plain.stderr
    assert "in 2 processes: peak " in done.stderr
    trace = Trace.open("run.memprof")
    assert [trace.manifest_of(rank).world_size for rank in trace.ranks] == [2, 2]
    ranks = trace.summary(Ranks)
    # Rank 1 has the larger batch; both ran on this machine, so their clock is one.
    assert compare_ranks(trace).worst == 1
    assert len({*ranks.clock}) == len({*ranks.node}) == 1
    assert job_notes(trace) == ()
    for rank in trace.ranks:
        one = trace.rank_trace(rank)
        for number in one.recorded_steps:
            one.step(number).check()
    collectives = trace.summary(RankCollectives)
    assert set(collectives.rank.tolist()) == {0, 1}
    found = find_stragglers(trace)
    assert (found.ranks[0].rank, found.alignment.clocks) == (1, 1)
    assert 2 * found.ranks[0].times_last > found.ranks[0].collectives
    assert found.ranks[0].kept_waiting_us > 100_000


def test_a_killed_rank_leaves_its_part(folder: Path) -> None:
    """The rank that died is in the file up to where it died, which the verdict and the report name; status as ever."""
    done = record(*torchrun(2), DIES="1")
    assert done.returncode == 1  # torchrun's own, where a rank was killed
    assert re.search(r"memprof: .* The recording of rank 1 ends early, in step \d, ", done.stderr)
    trace = Trace.open("run.memprof")
    assert trace.ranks == (0, 1)
    dead = trace.rank_trace(1)
    assert set(dead.recorded_steps) >= {1}
    report = run(memprof("report", "run.memprof", "--by", "rank")).stdout
    assert "warning: The recording of rank 1 ends early, in step " in report
    assert "ends early" in next(line for line in report.splitlines() if line.startswith("   1 "))


def test_two_nodes_write_two_files_that_open_as_one(folder: Path) -> None:
    """Two parents with one name for their output write a file each, and the name opens both."""
    port = free_port()
    options = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--node-rank")
    commands = [
        memprof("record", "-o", "run.memprof", "--skip", "1", "--", *torchrun(1, *options, str(node)))
        for node in range(2)
    ]
    jobs = [
        subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for command in commands
    ]
    told = [job.communicate(timeout=240)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert sorted(path.name for path in folder.glob("*.memprof")) == ["run.node0.memprof", "run.node1.memprof"]
    assert all("It is one part of run.memprof" in text for text in told)
    trace = Trace.open("run.memprof")
    assert trace.ranks == (0, 1)
    assert job_notes(trace) == ()
    assert job_notes(Trace.open("run.node0.memprof")) == (
        "Of 2 ranks, rank 1 is missing: there is no recording of it here.",
    )


@pytest.mark.slow
def test_clocks_of_two_nodes_are_aligned(folder: Path) -> None:
    """Shifted by three seconds, the second rank's times are aligned within the reported error."""
    import dataclasses

    from memprof.trace.schema import TABLES, Ops
    from memprof.trace.store import write_trace

    assert record(*torchrun(2)).returncode == 0
    trace = Trace.open("run.memprof")
    ranks = []
    for rank in trace.ranks:
        one = trace.rank_trace(rank)
        tables = {kind: one.table(kind) for kind in TABLES}
        ops = one.table(Ops)
        tables[Ops] = ops.replace(start_us=ops.start_us + 3e6 * rank)
        ranks.append((dataclasses.replace(one.manifest, clock=f"clock {rank}"), tables))
    write_trace("shifted.memprof", ranks)
    aligned = find_stragglers(Trace.open("shifted.memprof")).alignment
    assert aligned.clocks == 2
    assert abs(aligned.offset_us[1] + 3e6) <= aligned.error_us[1] < 1e6


@pytest.mark.slow
def test_processes_that_a_script_starts_itself_are_named(folder: Path) -> None:
    """Ranks that no environment variable gives are read from the job's process group."""
    done = run(memprof("record", "-o", "run.memprof", "spawning.py"), PORT=free_port())
    assert done.returncode == 0, done.stderr
    trace = Trace.open("run.memprof")
    assert [(rank, trace.manifest_of(rank).world_size) for rank in trace.ranks] == [(0, 2), (1, 2)]
    assert compare_ranks(trace).worst == 1


@pytest.mark.parametrize(
    "names",
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        pytest.param(("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), marks=pytest.mark.slow),
    ],
)
def test_one_parent_a_rank_writes_one_file_a_rank(folder: Path, names: tuple[str, str]) -> None:
    """With mpirun and srun each rank's memprof writes a part; a missing one is reported."""
    for rank in (0, 2):
        done = run(
            memprof("record", "-o", "run.memprof", "alone.py"), **dict(zip(names, (str(rank), "3"), strict=True))
        )
        assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.glob("*.memprof")) == ["run.rank0.memprof", "run.rank2.memprof"]
    report = run(memprof("report", "run.memprof")).stdout
    assert "warning: Of 3 ranks, rank 1 is missing: there is no recording of it here." in report


@pytest.mark.slow
def test_a_rank_that_hangs_is_told_after_an_interrupt(folder: Path) -> None:
    """While one rank sleeps the job is interrupted: recorded data is packed, and the stopped rank is named."""
    command = memprof("record", "-o", "run.memprof", "--skip", "0", "--", *torchrun(2)[:-1], "hanging.py")
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + 120
        while len(list(folder.glob("trained-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        job.terminate()
        _, told = job.communicate(timeout=120)
    trace = Trace.open("run.memprof")
    assert trace.ranks == (0, 1), told
    first, hanging = trace.summary(Ranks).last_step.tolist()
    assert hanging == 2 < first
    assert "rank 1" in " ".join(job_notes(trace))
    assert "rank 1" in told


def test_a_recording_goes_to_an_address(folder: Path) -> None:
    """The file is written here, moved there whole, and named there; one that is there is not replaced."""
    pytest.importorskip("upath")
    address = f"file://{folder}/there/run.memprof"
    refused = run(memprof("record", "-o", "nosuch://x/run.memprof", "alone.py"))
    assert (refused.returncode, "is not an address supported by fsspec" in refused.stderr) == (125, True)
    stays = run(memprof("record", "-o", address, "alone.py"))
    assert (stays.returncode, "the recording stays in run.memprof" in stays.stderr) == (0, True)
    (folder / "run.memprof").unlink()
    (folder / "there").mkdir()
    done = run(memprof("record", "-o", address, "alone.py"))
    assert f"next: memprof report {address}" in done.stderr
    assert not (folder / "run.memprof").exists()
    assert "peak " in run(memprof("report", address)).stdout
    again = run(memprof("record", "-o", address, "alone.py"))
    assert (again.returncode, "exists already" in again.stderr) == (125, True)


@pytest.mark.slow
def test_a_with_statement_in_every_rank_writes_a_file_for_each(folder: Path) -> None:
    """`memprof.record` names the same file in every rank; each writes its part, and they open as one."""
    inside = JOB.replace(
        "for step in range(6):",
        "import memprof\nrecorder = memprof.record('run.memprof', skip=1)\nrecorder.__enter__()\nfor step in range(6):",
    )
    inside = inside.replace("os.write(1", "recorder.__exit__(None, None, None)\nos.write(1")
    (folder / "ddp.py").write_text(inside)
    done = run(torchrun(2))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.glob("*.memprof")) == ["run.rank0.memprof", "run.rank1.memprof"]
    trace = Trace.open("run.memprof")
    assert (trace.ranks, compare_ranks(trace).worst) == ((0, 1), 1)
