"""Packing, opening and comparing many ranks: time and memory, local and through Dask on two workers."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path

from lab.benchmarks.recording import environment, measure_program, run_for_json, sample
from lab.benchmarks.section import Section, verdict
from memprof.launch.parent.job_process import recording_environment
from memprof.launch.parent.settings import Settings
from memprof.trace.files.spool import FILE_NAME
from memprof.trace.manifest import Machine, Manifest
from memprof.trace.store import write_trace
from tests.synthetic import Table, make_synthetic

#: Operators of a synthetic rank, and ranks of a node.
_OPERATORS, _PER_NODE = 20_000, 8
_HEADER = struct.Struct("<4sHIIH")  # of a frame of the spool, see memprof.trace.files.spool

_PACK = """
from memprof.trace.files.pack import pack_spool
done = pack_spool(sys.argv[1], sys.argv[2])
assert len(done.ranks) == int(sys.argv[3]), done
"""
_OPEN = "from memprof.trace.store import Trace\ntrace = Trace.open(sys.argv[1])\n"
_RANKS = "from memprof.analysis.ranks.rank_report import"
_EVERY = """
from memprof.analysis.ranks.distributed_reading import map_ranks, peak_curve
import functools
found = map_ranks(sys.argv[1], functools.partial(peak_curve, stretches=256){more})
"""
#: What is read of a job's recordings, and how, with memprof's imports in the time.
_READERS = {
    "open": _OPEN,
    "open and worst rank": f"{_OPEN}{_RANKS} compare_ranks\nfound = compare_ranks(trace).worst\n",
    "open and heatmap": f"{_OPEN}{_RANKS} read_curves\nassert len(read_curves(trace).ranks)\n",
    "every operator of every rank, no Dask workers": _EVERY.format(more=", scheduler='synchronous'"),
}
_CLUSTER = f"""
import json, sys, time
if __name__ == "__main__":
    from dask.distributed import Client, LocalCluster
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        start = time.perf_counter()
{textwrap.indent(_EVERY.format(more=""), " " * 8)}
        took = time.perf_counter() - start
        held = client.run(lambda: next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
        largest = max(int(line.split()[1]) for line in held.values()) * 1024
    print(json.dumps([took, largest]))
"""


def measure(folder: Path, *, quick: bool) -> Section:
    """Packs recordings of many ranks, then opens and compares synthetic ones of twenty thousand operators a rank."""
    figures: dict[str, tuple[float, float]] = {}
    spool = _record(folder)
    for ranks in (8,) if quick else (8, 64):
        figures[f"pack {ranks} ranks of gpt"] = _pack(spool, folder, ranks)
    for ranks in (8,) if quick else (64, 1024):
        job = folder / f"job-{ranks}"
        job.mkdir()
        for node in range(ranks // _PER_NODE):
            write_trace(job / f"run.node{node}.memprof", _node(node, ranks))
        for name, program in _READERS.items():
            figures[f"{name}, {ranks:,} ranks"] = measure_program(program, folder, job)
        clustered = run_for_json([sys.executable, "-c", _CLUSTER, str(job)], folder)
        figures[f"every operator of every rank, Dask on two workers, {ranks:,} ranks"] = clustered
        shutil.rmtree(job)
    seconds, memory = figures[f"open and worst rank, {ranks:,} ranks"]
    return Section(
        "Many ranks",
        "Packing: a real recording (sample_traces/gpt), copied once per rank, in one parent. The others are "
        f"synthetic: {_OPERATORS:,} operators a rank, in one file for each {_PER_NODE} ranks, each measured in a fresh "
        "process with its imports; memory is the process's highest resident size, with Dask that of the larger worker. "
        "Worst rank and heatmap use the summaries that packing writes; the last two rows read and replay every rank's "
        "tables.",
        ("what", "time", "memory"),
        [
            (name, f"{took:.2f} s" if took < 10 else f"{took:.0f} s", f"{held / 2**20:,.0f} MiB")
            for name, (took, held) in figures.items()
        ],
        verdict("1,024 ranks: open and worst rank within 10 s and 1 GiB", passed=seconds <= 10 and memory <= 2**30),
    )


def _record(folder: Path) -> Path:
    """Runs the job with the recorder in it, and leaves what it recorded unpacked."""
    spool = folder / "gpt.spool"
    spool.mkdir()
    told = recording_environment(environment(), spool, Settings(stop=True))
    subprocess.run(sample("gpt").command, env=told, check=True, stdout=subprocess.DEVNULL)
    (spool / "launch.json").write_text(json.dumps({"command": ["train.py"], "target": "train.py"}))
    (spool / "exit.json").write_text(json.dumps({"returncode": 0}))
    return spool


def _pack(spool: Path, folder: Path, ranks: int) -> tuple[float, float]:
    copies = folder / f"copies-{ranks}"
    copies.mkdir()
    for name in ("launch.json", "exit.json"):
        shutil.copy(spool / name, copies)
    (process,) = spool.glob("process-*/")
    data = (process / FILE_NAME).read_bytes()
    for rank in range(ranks):
        into = copies / f"process-{100_000 + rank}"
        into.mkdir()
        (into / FILE_NAME).write_bytes(_as_rank(data, rank, ranks))
    return measure_program(_PACK, folder, copies, folder / f"packed-{ranks}.memprof", ranks)


def _as_rank(data: bytes, rank: int, ranks: int) -> bytes:
    """Returns a raw recording with another rank in the record that it starts with."""
    magic, name_length, length, _, last = _HEADER.unpack_from(data)
    end = _HEADER.size + name_length
    name, record = data[_HEADER.size : end], json.loads(data[end : end + length])
    payload = json.dumps({**record, "rank": rank, "world_size": ranks, "pid": 100_000 + rank}).encode()
    header = _HEADER.pack(magic, name_length, len(payload), zlib.crc32(name + payload), last)
    return header + name + payload + data[end + length :]


def _node(node: int, ranks: int) -> Iterator[tuple[Manifest, dict[type[Table], Table]]]:
    machine = Machine(device_name="synthetic", device_kind="cuda", memory_bytes=2**37, capacity_bytes=2**36)
    manifest = Manifest(target="train.py", world_size=ranks, machine=machine, node=f"node{node}", clock=f"clock{node}")
    for rank in range(node * _PER_NODE, (node + 1) * _PER_NODE):
        yield dataclasses.replace(manifest, rank=rank), make_synthetic(2 * _OPERATORS, seed=rank)
