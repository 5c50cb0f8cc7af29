"""Packing, opening and comparing many ranks: time and memory, local and through Dask on two workers."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.benchmarks.recording import environment, run_for_json
from lab.benchmarks.section import Section, verdict
from memprof.launch.parent.job_process import recording_environment
from memprof.launch.parent.settings import Settings
from memprof.trace.files.spool import FILE_NAME
from memprof.trace.manifest import Machine, Manifest
from memprof.trace.store import write_trace
from tests.synthetic import Table, make_synthetic

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "sample_traces" / "gpt" / "train.py"
#: Operators of a synthetic rank, and ranks of a node.
_OPERATORS, _PER_NODE = 20_000, 8
_HEADER = struct.Struct("<4sHIIH")  # of a frame of the spool, see memprof.trace.files.spool

_PACK = """
from memprof.trace.files.pack import pack_spool
done = pack_spool(sys.argv[1], sys.argv[2])
assert len(done.ranks) == int(sys.argv[3]), done
"""
_OPEN = "from memprof.trace.store import Trace\ntrace = Trace.open(sys.argv[1])\n"
_WORST = f"{_OPEN}from memprof.analysis.ranks.rank_report import compare_ranks\nfound = compare_ranks(trace).worst\n"
_HEATMAP = f"{_OPEN}from memprof.analysis.ranks.rank_report import read_curves\nassert len(read_curves(trace).ranks)\n"
_EVERY = """
from memprof.analysis.ranks.distributed_reading import map_ranks, peak_curve
import functools
found = map_ranks(sys.argv[1], functools.partial(peak_curve, stretches=256), scheduler={scheduler!r})
"""
_CLUSTER = """
if __name__ == "__main__":
    from dask.distributed import Client, LocalCluster
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        start = time.perf_counter()
        import functools
        from memprof.analysis.ranks.distributed_reading import map_ranks, peak_curve
        found = map_ranks(sys.argv[1], functools.partial(peak_curve, stretches=256))
        took = time.perf_counter() - start
        held = client.run(lambda: next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
        largest = max(int(line.split()[1]) for line in held.values()) * 1024
    print(json.dumps([took, largest]))
"""
_MEASURED = """
import json, sys, time
start = time.perf_counter()
{body}
took = time.perf_counter() - start
# Not getrusage: its highest is that of the process that started this one, where that was larger.
held = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([took, int(held.split()[1]) * 1024]))
"""


def measure(folder: Path, *, quick: bool) -> Section:
    """Packs recordings of many ranks, then opens and compares synthetic ones of twenty thousand operators a rank."""
    rows = []
    spool = _record(folder)
    for ranks in (8,) if quick else (8, 64):
        took, memory = _pack(spool, folder, ranks)
        rows.append((f"pack {ranks} ranks of gpt", _seconds(took), _mib(memory)))
    figures: dict[str, tuple[float, float]] = {}
    for ranks in (8,) if quick else (64, 1024):
        job = folder / f"job-{ranks}"
        job.mkdir()
        for node in range(ranks // _PER_NODE):
            write_trace(job / f"run.node{node}.memprof", _node(node, ranks))
        for name, body in (
            ("open", _OPEN),
            ("open and worst rank", _WORST),
            ("open and heatmap", _HEATMAP),
            ("every operator of every rank, no Dask workers", _EVERY.format(scheduler="synchronous")),
        ):
            figures[name] = _run(_MEASURED.format(body=body), job)
            rows.append((f"{name}, {ranks:,} ranks", *_cells(figures[name])))
        figures["cluster"] = _run(f"import json, sys, time\n{_CLUSTER}", job)
        rows.append(
            (f"every operator of every rank, Dask on two workers, {ranks:,} ranks", *_cells(figures["cluster"]))
        )
        shutil.rmtree(job)
    return Section(
        "Many ranks",
        "Packing: a real recording (sample_traces/gpt), copied once per rank, in one parent. The others are "
        f"synthetic: {_OPERATORS:,} operators a rank, in one file for each {_PER_NODE} ranks, each measured in a fresh "
        "process with its imports; memory is the process's highest resident size, with Dask that of the larger worker. "
        "Worst rank and heatmap use the summaries that packing writes; the last two rows read and replay every rank's "
        "tables.",
        ("what", "time", "memory"),
        tuple(rows),
        verdict(
            "1,024 ranks: open and worst rank within 10 s and 1 GiB",
            passed=figures["open and worst rank"][0] <= 10 and figures["open and worst rank"][1] <= 2**30,
        ),
    )


def _record(folder: Path) -> Path:
    """Runs the job with the recorder in it, and leaves what it recorded unpacked."""
    spool = folder / "gpt.spool"
    spool.mkdir()
    told = recording_environment(environment(), spool, Settings(stop=True))
    subprocess.run([sys.executable, str(JOB)], env=told, check=True, stdout=subprocess.DEVNULL)
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
    return _run(_MEASURED.format(body=_PACK), copies, folder / f"packed-{ranks}.memprof", ranks)


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


def _run(code: str, *arguments: Any) -> tuple[float, float]:
    took, memory = run_for_json([sys.executable, "-c", code, *map(str, arguments)], Path.cwd())
    return took, memory


def _cells(figure: tuple[float, float]) -> tuple[str, str]:
    return _seconds(figure[0]), _mib(figure[1])


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def _mib(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB"
